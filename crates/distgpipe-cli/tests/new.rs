//! `distgpipe new`: what it creates and what it refuses. scripts/check-packaging.sh builds the project and trains with it.

mod command;

use command::{directory, ended, refused};
use std::path::Path;

fn text(path: &Path) -> &str {
    path.to_str().expect("the target directory has a name in UTF-8")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn toml(path: &Path) -> toml::Table {
    toml::from_str(&read(path)).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn a_project_depends_on_the_checkout_of_the_command_and_links_libtorch() {
    let project = directory("new").join("my-app");
    let (out, _) = ended(0, &["new", text(&project)]);
    assert!(out.contains("created my-app") && out.contains("cargo run"), "{out}");
    let manifest = toml(&project.join("Cargo.toml"));
    assert_eq!(manifest["package"]["name"].as_str(), Some("my-app"));
    let dependency = manifest["dependencies"]["distgpipe"]["path"].as_str().expect("a path");
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../distgpipe").canonicalize().expect("the library");
    assert_eq!(Path::new(dependency), own);
    for file in [".cargo/config.toml", ".gitignore", "build.rs", "src/main.rs", "Cargo.lock"] {
        assert!(!read(&project.join(file)).is_empty(), "{file}");
    }
    let link = std::fs::read_link(project.join(".libtorch")).expect("a link");
    assert!(link.is_absolute() && link.join("lib/libtorch_cpu.so").exists(), "{}", link.display());
    let config = toml(&project.join(".cargo/config.toml"));
    assert_eq!(config["env"]["LIBTORCH"]["value"].as_str(), Some(".libtorch"));
}

#[test]
fn the_dependency_can_be_another_checkout_or_a_repository() {
    let root = directory("new-dependency");
    let checkout = root.join("a \"checkout\"");
    std::fs::create_dir_all(checkout.join("crates/distgpipe")).unwrap();
    std::fs::write(checkout.join("crates/distgpipe/Cargo.toml"), "").unwrap();
    let dependency = |name: &str, flags: &[&str]| -> toml::Value {
        let project = root.join(name);
        ended(0, &[&["new", text(&project)], flags].concat());
        let manifest = toml(&project.join("Cargo.toml"));
        manifest["dependencies"]["distgpipe"].clone()
    };
    let path = dependency("by-path", &["--path", text(&checkout)]);
    assert_eq!(path["path"].as_str(), Some(text(&checkout.join("crates/distgpipe"))));
    let git = dependency("by-git", &["--git", "https://example.org/distgpipe.git"]);
    assert_eq!(git["git"].as_str(), Some("https://example.org/distgpipe.git"));
}

#[test]
fn what_cannot_be_a_project_is_refused_before_anything_is_written() {
    let root = directory("new-refused");
    let [used, file] = ["used", "file"].map(|name| root.join(name));
    std::fs::create_dir(&used).unwrap();
    std::fs::write(used.join("precious"), "data").unwrap();
    std::fs::write(&file, "data").unwrap();
    let new = |name: &str| root.join(name);
    for (arguments, parts) in [
        (vec![text(&used)], &["got one with files", "name another folder"][..]),
        (vec![text(&file)], &["got a file"]),
        (vec![text(&new("7up"))], &["`7up`", "expected a letter", "--name NAME"]),
        (vec![text(&new("größe"))], &["`größe`", "--name NAME"]),
        (vec![text(&new("distgpipe"))], &["uses this name", "--name NAME"]),
        (vec![text(&new("good")), "--name", "fn"], &["--name fn", "uses this name"]),
        (vec![text(&new("none/../good"))], &["there is no folder", "without `..`"]),
        (vec![text(&new("good")), "--path", text(&root)], &["--path", "expected a checkout of distgpipe"]),
    ] {
        let said = refused(2, &[&["new"], &arguments[..]].concat());
        for part in parts {
            assert!(said.contains(part), "{arguments:?}: {said}");
        }
    }
    let mut left: Vec<String> =
        std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["file", "used"]);
    assert_eq!(std::fs::read_dir(&used).unwrap().count(), 1);
    // An empty folder, and a name that is not the folder's.
    let empty = new("7");
    std::fs::create_dir(&empty).unwrap();
    ended(0, &["new", text(&empty), "--name", "seven"]);
    let spaced = new("with spaces");
    let (said, _) = ended(0, &["new", text(&spaced), "--name", "good"]);
    assert!(said.contains(&format!("\ncd '{}'\n", spaced.display())), "{said}");
    assert!(read(&empty.join("Cargo.toml")).contains("name = \"seven\""));
}
