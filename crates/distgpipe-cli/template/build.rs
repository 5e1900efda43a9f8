//! Lets the program find libtorch when it runs, in the directory that distgpipe was built against.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if let Ok(lib) = std::env::var("DEP_DISTGPIPE_ENGINE_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
    }
}
