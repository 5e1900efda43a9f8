//! Lets the binary find libtorch where the library was built against it, and lists the recipes and the figures that go into it.

use std::fmt::Write;
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if let Some(lib) = std::env::var_os("DEP_DISTGPIPE_ENGINE_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.to_string_lossy());
        // For `distgpipe new`.
        println!("cargo:rustc-env=DISTGPIPE_LIBTORCH_LIB={}", lib.to_string_lossy());
    }
    embed("recipes", "toml");
    embed("measured", "json");
}

/// Writes `DIRECTORY.rs`: name and text of every file in the directory with this extension, by name.
fn embed(directory: &str, extension: &str) {
    println!("cargo:rerun-if-changed={directory}");
    let entries = std::fs::read_dir(directory).unwrap_or_else(|e| panic!("{directory}: {e}"));
    let paths = entries.map(|entry| entry.expect("the directory can be read").path());
    let mut names: Vec<String> = paths
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect();
    names.sort();
    let mut list = String::from("[\n");
    for name in names {
        println!("cargo:rerun-if-changed={directory}/{name}.{extension}");
        let file = format!("/{directory}/{name}.{extension}");
        writeln!(list, "({name:?}, include_str!(concat!(env!(\"CARGO_MANIFEST_DIR\"), {file:?}))),")
            .expect("a string takes any text");
    }
    list.push_str("]\n");
    let out = std::env::var_os("OUT_DIR").expect("cargo says where to write");
    let file = Path::new(&out).join(format!("{directory}.rs"));
    std::fs::write(&file, list).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
}
