//! Weight files: against files that PyTorch wrote (`scripts/golden_pth.py`), against files that somebody spoilt, and there
//! and back through a pipeline.

use distgpipe::engine;
use distgpipe::model::zoo::Mlp;
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::train::weights::{self, Entry, SafetensorsWriter, WeightsError};
use distgpipe::{Pipeline, StepError};
use proptest::prelude::*;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pth").join(file)
}

/// A path for a file that is gone with this value.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Scratch(std::env::temp_dir().join(format!("distgpipe-weights-{}-{name}", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn kind(name: &str) -> Kind {
    match name {
        "float16" => Kind::Half,
        "bfloat16" => Kind::BFloat16,
        "float32" => Kind::Float,
        "float64" => Kind::Double,
        "int64" => Kind::Int64,
        "int32" => Kind::Int,
        "int16" => Kind::Int16,
        "int8" => Kind::Int8,
        "uint8" => Kind::Uint8,
        "bool" => Kind::Bool,
        other => panic!("{other}"),
    }
}

#[test]
fn files_of_torch_save_are_read_as_torch_load_reads_them() {
    let expected: Value = serde_json::from_slice(&std::fs::read(golden("expected.json")).unwrap()).unwrap();
    let files = expected.as_object().unwrap();
    assert_eq!(files.len(), 9);
    for (file, tensors) in files {
        let mut source = weights::open(&golden(&format!("{file}.pth"))).unwrap_or_else(|e| panic!("{file}: {e}"));
        let tensors = tensors.as_array().unwrap();
        assert_eq!(source.entries().len(), tensors.len(), "{file}");
        for (i, tensor) in tensors.iter().enumerate() {
            let dims: Vec<i64> = serde_json::from_value(tensor["dims"].clone()).unwrap();
            let values: Vec<f64> = serde_json::from_value(tensor["values"].clone()).unwrap();
            let entry = Entry::new(tensor["name"].as_str().unwrap(), kind(tensor["dtype"].as_str().unwrap()), &dims);
            assert_eq!(source.entries()[i], entry, "{file}");
            let read = source.read(i).unwrap();
            assert_eq!((read.kind(), read.size(), read.is_contiguous()), (entry.kind, dims, true), "{file}");
            let got: Vec<f64> = Vec::try_from(read.to_kind(Kind::Double).reshape([-1])).unwrap();
            assert_eq!(got, values, "{file}: {}", entry.name);
        }
    }
}

#[test]
fn anything_but_tensors_is_rejected_with_its_name_and_a_remedy() {
    let refused = |file: &str| weights::open(&golden(file)).err().unwrap_or_else(|| panic!("{file}")).to_string();
    for (file, parts) in [
        (
            "evil.pth",
            &["expected tensors only", "posix.system", "data.pkl", "at byte ", "only if you trust the file"][..],
        ),
        ("beside.pth", &["expected tensors only", "the number 3 as `epoch`", "if torch.is_tensor(v)"]),
        ("both_keys.pth", &["one dictionary of them", "`state_dict`, `model`", "weights_only=True)['KEY']"]),
        (
            "whole_module.pth",
            &["expected tensors only", "torch.nn.modules.linear.Linear", "only if you trust the file"],
        ),
        ("expanded.pth", &["once", "[1000] with strides [0]", ".contiguous()"]),
        ("list.pth", &["a dictionary of tensors", "a list", "as state_dict() gives it"]),
        ("legacy.pth", &["before 1.6", "python -c", "legacy.pth"]),
        ("compressed.pth", &["stored as they are", "compressed", "torch.save"]),
        ("expected.json", &["something else", "is this the right file?"]),
        ("missing.pth", &["missing.pth", "opening it"]),
    ] {
        let text = refused(file);
        for part in parts {
            assert!(text.contains(part), "{file}: {text} lacks {part}");
        }
        // Nobody is told to run what was refused because it would run.
        assert!(!text.contains("weights_only=False"), "{file}: {text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// No panic, and no tensor that is larger than the file it comes from.
    #[test]
    fn a_corrupt_file_is_read_or_rejected(
        file in prop::sample::select(vec!["contiguous.pth", "views.pth", "shared.pth", "module.pth", "nested.pth", "parameter.pth"]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        end in prop::option::weighted(0.1, any::<prop::sample::Index>()),
        in_pickle in any::<bool>(),
    ) {
        let mut bytes = std::fs::read(golden(file)).unwrap();
        // Most of a small archive is padding; the pickle comes first.
        let reach = if in_pickle { bytes.len().min(900) } else { bytes.len() };
        for (index, byte) in changes {
            bytes[index.index(reach)] = byte;
        }
        if let Some(end) = end {
            bytes.truncate(end.index(bytes.len()));
        }
        let path = Scratch::new(&format!("spoilt-{:?}", std::thread::current().id()));
        std::fs::write(&path.0, &bytes).unwrap();
        if let Ok(mut source) = weights::open(&path.0) {
            for i in 0..source.entries().len() {
                let elements: i64 = source.entries()[i].dims.iter().product();
                prop_assert!(elements as usize * source.entries()[i].kind.elt_size_in_bytes() <= bytes.len());
                let _ = source.read(i);
            }
        }
    }
}

fn bits(tensor: &Tensor) -> Vec<u8> {
    engine::bytes(&tensor.contiguous()).unwrap().to_vec()
}

#[test]
fn what_is_written_is_read_back_bit_for_bit_and_nothing_is_left_beside_it() {
    let directory = Scratch::new("directory");
    std::fs::create_dir_all(&directory.0).unwrap();
    let path = directory.0.join("model.safetensors");
    let tensors = [
        ("half", Tensor::from_slice(&[1.5, f64::NAN, -0.0]).to_kind(Kind::Half)),
        ("count", Tensor::from(7_i64)),
        ("turned", Tensor::arange(12, (Kind::Float, Device::Cpu)).view([3, 4]).tr()),
        ("empty", Tensor::zeros([0, 3], (Kind::Float, Device::Cpu))),
        ("byte", Tensor::from_slice(&[1u8, 2, 3])),
    ];
    let entries: Vec<Entry> = tensors.iter().map(|(name, t)| Entry::new(*name, t.kind(), &t.size())).collect();
    let about = BTreeMap::from([("step".to_owned(), "3".to_owned())]);
    std::fs::write(&path, "what was there").unwrap();
    let mut writer = SafetensorsWriter::create(&path, entries.clone(), &about).unwrap();
    for (_, tensor) in &tensors {
        assert_eq!(std::fs::read(&path).unwrap(), b"what was there", "the name is given last");
        writer.write(tensor).unwrap();
    }
    writer.finish().unwrap();
    assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), 1);
    let mut source = weights::open(&path).unwrap();
    for (name, tensor) in &tensors {
        let i = source.entries().iter().position(|entry| entry.name == *name).unwrap();
        assert_eq!(source.entries()[i].dims, tensor.size());
        assert_eq!(bits(&source.read(i).unwrap()), bits(tensor), "{name}");
    }
    // Somebody else's reader agrees.
    let theirs = Tensor::read_safetensors(&path).unwrap();
    assert_eq!(theirs.len(), tensors.len());

    // A writer that goes before its time leaves what was there.
    let before = std::fs::read(&path).unwrap();
    let mut writer = SafetensorsWriter::create(&path, entries.clone(), &about).unwrap();
    writer.write(&tensors[0].1).unwrap();
    let error = writer.finish().unwrap_err().to_string();
    assert!(error.contains("expected `count` and 3 more, got the end"), "{error}");
    assert_eq!((std::fs::read_dir(&directory.0).unwrap().count(), std::fs::read(&path).unwrap()), (1, before));
    std::fs::remove_dir_all(&directory.0).unwrap();
}

#[test]
fn only_what_was_announced_can_be_written() {
    let path = Scratch::new("announced");
    let create = |entries| SafetensorsWriter::create(&path.0, entries, &BTreeMap::new());
    let float = |name: &str| Entry::new(name, Kind::Float, &[2]);
    let mut writer = create(vec![float("a")]).unwrap();
    assert_eq!(writer.expected(), Some(&float("a")));
    let turned = Tensor::from_slice(&[1.0f32, 2.0]).view([1, 2]);
    for wrong in [Tensor::from_slice(&[1.0f32]), Tensor::from_slice(&[1.0f64, 2.0]), turned] {
        assert!(matches!(writer.write(&wrong), Err(WeightsError::UnexpectedTensor { .. })));
    }
    writer.write(&Tensor::from_slice(&[1.0f32, 2.0])).unwrap();
    assert!(matches!(writer.write(&Tensor::from_slice(&[1.0f32, 2.0])), Err(WeightsError::UnexpectedTensor { .. })));
    for wrong in
        [vec![float("a"), float("a")], vec![float("__metadata__")], vec![Entry::new("a", Kind::Float, &[-1, i64::MAX])]]
    {
        assert!(matches!(create(wrong), Err(WeightsError::UnexpectedTensor { .. })));
    }
    assert!(matches!(create(vec![Entry::new("c", Kind::ComplexFloat, &[1])]), Err(WeightsError::Type { .. })));
}

fn pipeline(seed: u64) -> Pipeline {
    let model = Mlp { hidden: vec![8, 8, 8], ..Mlp::default() }.model().unwrap();
    Pipeline::builder(model)
        .device(engine::Device::Cpu)
        .threads(1)
        .balance([1, 1, 1, 1])
        .place("a,b,a,c")
        .micro_batches(1)
        .seed(seed)
        .build()
        .unwrap()
}

#[test]
fn state_goes_through_a_file_one_tensor_at_a_time_in_the_order_that_was_announced() {
    let path = Scratch::new("state");
    let (mut from, mut to) = (pipeline(1), pipeline(2));
    let specs = from.state_specs();
    let entries = specs.iter().map(|spec| Entry::new(&spec.name, spec.kind, &spec.dims)).collect();
    let mut writer = SafetensorsWriter::create(&path.0, entries, &BTreeMap::new()).unwrap();
    from.state_each(|name, tensor| {
        assert_eq!(writer.expected().map(|entry| &entry.name[..]), Some(name));
        Ok::<(), StepError>(writer.write(&tensor)?)
    })
    .unwrap();
    writer.finish().unwrap();

    let mut source = weights::open(&path.0).unwrap();
    let mut names: Vec<String> = specs.iter().map(|spec| spec.name.clone()).collect();
    names.reverse();
    to.load_from(&names, |name| {
        let i = source.entries().iter().position(|entry| entry.name == name).unwrap();
        Ok::<Tensor, StepError>(source.read(i)?)
    })
    .unwrap();
    let (from, to) = (from.state().unwrap(), to.state().unwrap());
    assert_eq!(from.keys().collect::<Vec<_>>(), to.keys().collect::<Vec<_>>());
    assert_eq!(from.len(), 8);
    assert!(from.iter().all(|(name, tensor)| bits(tensor) == bits(&to[name])));
}

/// The first and the third layer are `a`'s.
#[test]
fn tensors_are_read_worker_by_worker() {
    let mut pipeline = pipeline(0);
    let names: Vec<String> = pipeline.state_specs().iter().map(|spec| spec.name.clone()).rev().collect();
    let state = pipeline.state().unwrap();
    let mut asked = Vec::new();
    pipeline
        .load_from(&names, |name| {
            asked.push(name.split('.').nth(1).unwrap().to_owned());
            Ok::<Tensor, StepError>(state[name].copy())
        })
        .unwrap();
    assert_eq!(asked, ["2", "2", "0", "0", "1", "1", "3", "3"]);
}

/// What is read here is counted apart from what workers hold. The other tests of this file hold a few kilobytes.
#[test]
fn loading_a_large_model_holds_only_a_part_of_it_at_a_time() {
    const MIB: u64 = 1 << 20;
    let model = Mlp { hidden: vec![2048; 11], ..Mlp::default() }.model().unwrap();
    let mut pipeline = Pipeline::builder(model)
        .device(engine::Device::Cpu)
        .threads(1)
        .balance([6, 6])
        .place("a,b")
        .micro_batches(1)
        .build()
        .unwrap();
    let specs = pipeline.state_specs();
    let names: Vec<String> = specs.iter().map(|spec| spec.name.clone()).collect();
    let total: u64 = specs.iter().map(|spec| 4 * spec.elements()).sum();
    assert!(total > 160 * MIB);
    engine::peak_bytes(Device::Cpu, 0);
    pipeline
        .load_from(&names, |name| {
            let spec = specs.iter().find(|spec| spec.name == name).unwrap();
            Ok::<Tensor, StepError>(Tensor::ones(&spec.dims[..], (spec.kind, Device::Cpu)))
        })
        .unwrap();
    let peak = engine::peak_bytes(Device::Cpu, 0);
    assert!((16 * MIB..66 * MIB).contains(&peak), "{} MiB", peak / MIB);

    let mut seen = 0;
    pipeline
        .state_each(|_, tensor| {
            seen += u64::from(f64::try_from(tensor.mean(Kind::Float)).unwrap() == 1.0);
            Ok::<(), StepError>(())
        })
        .unwrap();
    assert_eq!(seen, specs.len() as u64);
}

#[test]
fn a_pipeline_stays_usable_after_a_reader_or_writer_fails() {
    let mut pipeline = pipeline(0);
    let names: Vec<String> = pipeline.state_specs().iter().map(|spec| spec.name.clone()).collect();
    let broken = |name: &str| StepError::Load(format!("no {name}"));
    let error = pipeline.load_from(&names, |_| Ok::<_, StepError>(Tensor::zeros([1], (Kind::Float, Device::Cpu))));
    assert!(matches!(error, Err(StepError::Load(ref why)) if why.contains("the model's is")), "{error:?}");
    let error = pipeline.load_from(&names, |name| Err(broken(name)));
    assert!(matches!(error, Err(StepError::Load(ref why)) if why == "no layers.0.weight"), "{error:?}");
    for wrong in [vec!["other".to_owned()], vec![names[0].clone(), names[0].clone()]] {
        assert!(matches!(pipeline.load_from(&wrong, |name| Err(broken(name))), Err(StepError::Load(_))));
    }
    let mut taken = 0;
    let error = pipeline.state_each(|name, _| {
        taken += 1;
        if taken == 2 {
            Err(broken(name))
        } else {
            Ok(())
        }
    });
    assert!(matches!(error, Err(StepError::Load(_))), "{error:?}");
    assert_eq!(taken, 2);
    assert_eq!(pipeline.state().unwrap().len(), 8);
}
