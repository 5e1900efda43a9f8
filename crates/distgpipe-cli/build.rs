//! Lets the binary find libtorch where the library was built against it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if let Some(lib) = std::env::var_os("DEP_DISTGPIPE_ENGINE_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.to_string_lossy());
    }
}
