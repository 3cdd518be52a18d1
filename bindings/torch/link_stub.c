/* An empty library whose SONAME is libtorch_cpu.so: linking against it records the dependency without any torch being
 * there. Never installed; at run time the process holds the real library already, because `import torch` came first. */
typedef int gatedelta_link_stub_is_empty;
