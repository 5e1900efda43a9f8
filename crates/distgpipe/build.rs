//! Compiles the C++ shim against libtorch's headers and hands libtorch's place on:
//! to our own tests and examples as an rpath, to dependent packages as `DEP_DISTGPIPE_ENGINE_LIBTORCH_LIB`.

use std::path::PathBuf;

fn main() {
    for source in [
        "shim.cpp",
        "operators.cpp",
        "tensor_list.cpp",
        "cuda.cpp",
        "instance_norm.cpp",
        "guarded.h",
        "cuda_declarations",
    ] {
        println!("cargo:rerun-if-changed=src/engine/{source}");
    }
    println!("cargo:rerun-if-changed=build.rs");
    // Documentation needs neither libtorch nor the shim, and torch-sys does not look for libtorch either.
    if std::env::var_os("CARGO_FEATURE_DOC_ONLY").is_some() {
        return;
    }
    // torch-sys found libtorch (LIBTORCH, or the link that `make setup` leaves at .libtorch) and says where.
    let lib = std::env::var_os("DEP_TCH_LIBTORCH_LIB")
        .map(PathBuf::from)
        .expect("torch-sys did not say where libtorch is: run `make setup` once, or set LIBTORCH to a libtorch 2.11.0");
    // The link in the checkout may be gone when the binary runs; the directory behind it is what is meant.
    let lib = lib.canonicalize().unwrap_or_else(|e| {
        panic!(
            "libtorch is missing at {}: {e}; run `make setup` once, or set LIBTORCH to a libtorch 2.11.0",
            lib.display()
        )
    });
    let root = lib.parent().expect("libtorch's lib directory has a parent");
    cc::Build::new()
        .cpp(true)
        .pic(true)
        .warnings(false)
        .std("c++17")
        .flag("-D_GLIBCXX_USE_CXX11_ABI=1")
        .include("src/engine/cuda_declarations")
        .include(root.join("include"))
        .include(root.join("include/torch/csrc/api/include"))
        .file("src/engine/shim.cpp")
        .file("src/engine/operators.cpp")
        .file("src/engine/tensor_list.cpp")
        .file("src/engine/cuda.cpp")
        .file("src/engine/instance_norm.cpp")
        .compile("distgpipe_shim");
    println!("cargo:libtorch_lib={}", lib.display());
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
}
