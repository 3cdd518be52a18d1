//! Programs and tests of this package find the library where the linker found it.
fn main() {
    if let Ok(folder) = std::env::var("DEP_GATEDELTA_LIBDIR") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    }
}
