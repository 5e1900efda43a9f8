//! `distgpipe devices`, which must be of use on a machine without a GPU, too.

mod command;

use command::{distgpipe, fine, json};

#[test]
fn devices_and_libraries_are_listed_with_remedies() {
    let found = json(&["devices", "--json"]);
    assert!(found["cpu"]["cores"].as_u64().unwrap() > 0 && found["cpu"]["memory_bytes"].as_u64().unwrap() > 1 << 20);
    let said = fine(&["devices"]);
    assert!(said.lines().any(|line| line.starts_with("cpu ") && line.contains(" core")), "{said}");
    let libraries = found["libraries"].as_array().unwrap();
    let files: Vec<&str> = libraries.iter().map(|library| library["file"].as_str().unwrap()).collect();
    assert_eq!(files, ["libcuda.so.1", "libtorch_cuda.so", "libnvrtc.so.13"]);
    for library in libraries {
        let file = library["file"].as_str().unwrap();
        let line = said.lines().find(|line| line.starts_with(file)).unwrap_or_else(|| panic!("{file}: {said}"));
        match library["problem"].as_str() {
            Some(problem) => {
                assert!(line.ends_with("missing"), "{line}");
                let remedy = library["remedy"].as_str().unwrap();
                assert!(said.contains(&format!("{file}: {problem}\n  {remedy}\n")), "{said}");
            }
            None => assert!(line.contains("works"), "{line}"),
        }
    }
    let auto = found["auto"].as_str().unwrap();
    assert!(said.ends_with(&format!("--device auto, the default, is {auto} here\n")), "{said}");
    let gpus = found["cuda"].as_array().unwrap().len();
    assert_eq!(said.lines().filter(|line| line.starts_with("cuda:")).count(), gpus, "{said}");
}

/// A driver that cannot be used must not end the command: here is a library of its name without its functions.
#[test]
fn a_library_that_is_no_driver_is_a_problem_with_a_remedy() {
    let folder = command::directory("devices-no-driver");
    std::fs::write(folder.join("libcuda.so.1"), b"not a library").unwrap();
    let output = distgpipe(&["devices"]).env("LD_LIBRARY_PATH", &folder).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("libcuda.so.1: ") && said.contains("install NVIDIA's driver"), "{said}");
}
