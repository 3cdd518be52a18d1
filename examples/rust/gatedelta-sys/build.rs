//! Finds the library: in GATEDELTA_LIB_DIR, else where pkg-config says, else where the linker looks anyway.
use std::{env, process::Command};

fn main() {
    println!("cargo:rerun-if-env-changed=GATEDELTA_LIB_DIR");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    let folder = env::var("GATEDELTA_LIB_DIR").ok().or_else(|| {
        let asked = Command::new("pkg-config").args(["--variable=libdir", "gatedelta"]).output().ok()?;
        let folder = String::from_utf8(asked.stdout).ok()?.trim().to_owned();
        (asked.status.success() && !folder.is_empty()).then_some(folder)
    });
    if let Some(folder) = folder {
        println!("cargo:rustc-link-search=native={folder}");
        println!("cargo:libdir={folder}"); // DEP_GATEDELTA_LIBDIR to build scripts of dependents
    }
    println!("cargo:rustc-link-lib=dylib=gatedelta");
}
