//! Archives of torch.export: what is read of them, where they can be cut, and that no damaged or hostile one causes a panic
//! or a large allocation. `scripts/golden_pt2.py` writes `pt2/small.pt2`.

use distgpipe_core::pt2::archive::{self, PlacedTensor};
use distgpipe_core::pt2::graph::{GraphParts, Number};
use distgpipe_core::pt2::{Arg, Boundaries, Graph, Layer, Node, Pt2Error, Size, State, ValueInfo};
use distgpipe_core::weights::TensorType;
use proptest::prelude::*;
use std::ops::Range;

const SMALL: &[u8] = include_bytes!("pt2/small.pt2");

fn graph(file: &[u8]) -> Result<Graph, Pt2Error> {
    archive::graph(file.len() as u64, &mut reader(file))
}

fn weights(file: &[u8]) -> Result<Vec<PlacedTensor>, Pt2Error> {
    archive::weights(file.len() as u64, &mut reader(file))
}

/// Reads a range of the file, which must be inside of it.
fn reader(file: &[u8]) -> impl FnMut(Range<u64>) -> Result<Vec<u8>, Pt2Error> + '_ {
    |range| Ok(file[range.start as usize..range.end as usize].to_vec())
}

/// The archive with one text replaced by another of the same length, wherever it stands.
fn altered(from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let (mut file, mut count) = (SMALL.to_vec(), 0);
    for at in 0..file.len() - from.len() {
        if file[at..].starts_with(from.as_bytes()) {
            file[at..at + to.len()].copy_from_slice(to.as_bytes());
            count += 1;
        }
    }
    assert!(count > 0, "`{from}` is not in the archive");
    file
}

fn layers(boundaries: Boundaries) -> Vec<Layer> {
    graph(SMALL).unwrap().layers(boundaries).unwrap()
}

#[test]
fn an_archive_has_the_states_of_the_module_and_where_they_are() {
    let graph = graph(SMALL).unwrap();
    let states: Vec<(&str, bool)> = graph.states.iter().map(|state| (&state.name[..], state.trained)).collect();
    let expected = [
        ("stem.weight", true),
        ("stem.bias", true),
        ("block.conv.weight", true),
        ("block.norm.weight", true),
        ("block.norm.bias", true),
        ("head.weight", true),
        ("head.bias", true),
        ("block.norm.running_mean", false),
        ("block.norm.running_var", false),
        ("block.norm.num_batches_tracked", false),
    ];
    assert_eq!(states, expected);
    assert_eq!(graph.values[0].sample_dims(), Some(vec![1, 2, 2]));
    assert_eq!(graph.values[graph.output as usize].sample_dims(), Some(vec![3]));
    let variance = weights(SMALL).unwrap().into_iter().find(|(t, _)| t.name == "block.norm.running_var").unwrap();
    assert!(variance.0.is_contiguous());
    assert_eq!(SMALL[variance.1 as usize..][..8], [1.0_f32.to_le_bytes(), 1.0_f32.to_le_bytes()].concat()[..]);
}

#[test]
fn layers_end_where_modules_end_and_carry_what_later_ones_need() {
    let modules = layers(Boundaries::Modules);
    let names: Vec<&str> = modules.iter().map(|layer| &layer.name[..]).collect();
    assert_eq!(names, ["stem", "block", "drop", "head", "add"]);
    let all = layers(Boundaries::All);
    assert!(all.len() > modules.len());
    for layers in [modules, all] {
        for pair in layers.windows(2) {
            assert_eq!(pair[0].outputs, pair[1].inputs);
            assert!(!pair[0].outputs.is_empty());
        }
        let mut open: Vec<&(String, u32)> = Vec::new();
        for layer in &layers {
            for pop in &layer.pops {
                open.remove(open.iter().position(|&stash| stash == pop).expect("stashed before"));
            }
            open.extend(&layer.stashes);
        }
        assert!(open.is_empty(), "every skip is popped");
        let mut states: Vec<usize> = layers.iter().flat_map(|layer| layer.states.clone()).collect();
        states.sort_unstable();
        assert_eq!(states, (0..10).collect::<Vec<_>>(), "every state in one layer");
    }
}

/// ReLU changes the result of the batch norm in place, so the two stay together.
#[test]
fn a_value_that_is_changed_in_place_later_crosses_no_boundary() {
    let graph = graph(SMALL).unwrap();
    let place = |op: &str| graph.nodes.iter().position(|node| node.op == op).unwrap();
    let (norm, relu) = (place("batch_norm.default"), place("relu_.default"));
    let together = |layer: &Layer| layer.nodes.contains(&norm) == layer.nodes.contains(&relu);
    assert!(layers(Boundaries::All).iter().all(together));
}

/// The last layer adds numbers that depend on the rows alone. They are computed there and do not cross a boundary.
#[test]
fn values_without_input_are_computed_where_they_are_used() {
    let graph = graph(SMALL).unwrap();
    let arange = graph.nodes.iter().position(|node| node.op == "arange.default").unwrap();
    let made: Vec<String> =
        layers(Boundaries::Modules).into_iter().filter(|l| l.nodes.contains(&arange)).map(|l| l.name).collect();
    assert_eq!(made, ["add"]);
}

#[test]
fn a_graph_survives_its_way_to_another_process() {
    let graph = graph(SMALL).unwrap();
    let text = serde_json::to_string(&graph).unwrap();
    assert_eq!(serde_json::from_str::<Graph>(&text).unwrap(), graph);
    assert!(text.len() < SMALL.len() / 2, "{} bytes", text.len());
}

#[test]
fn what_cannot_be_trained_is_refused_in_words() {
    let refused = |file: &[u8]| graph(file).unwrap_err().to_string();
    let hints: [(&str, &str, &str); 9] = [
        (
            "torch.ops.aten.flatten.using_ints",
            "torch.ops.aten.from_file.using___",
            "`aten.from_file.using___` in the model",
        ),
        (
            "torch.ops.aten.dropout.default",
            "torch.ops.evil.dropout.default",
            "torch.ops.evil.dropout.default in `drop`",
        ),
        ("\"2.11.0", "\"2.12.0", "export the model with PyTorch 2.11"),
        ("little", "bigger", "little-endian"),
        ("\"use_pickle\": false", "\"use_pickle\": true ", "pickled parts are never opened"),
        ("Symbol('s77', positive", "Symbol('s78', positive", ""),
        ("running_mean\", \"persistent\": true", "running_meal\", \"persistent\": true", "a description of"),
        ("torch.ops.aten.add_.Tensor", "torch.ops.aten.mul_.Tensor", "changed in place"),
        ("\"major\": 8", "\"major\": 9", "PyTorch 2.11"),
    ];
    for (from, to, said) in hints {
        let file = altered(from, to);
        match said {
            // Another name for the same symbol is none of our business.
            "" => assert!(graph(&file).is_ok()),
            said => assert!(refused(&file).contains(said), "{from}: {}", refused(&file)),
        }
    }
}

#[test]
fn an_archive_says_whether_it_was_compared_with_its_module() {
    let compared = |file: &[u8]| archive::is_compared::<Pt2Error>(file.len() as u64, &mut reader(file)).unwrap();
    assert!(compared(SMALL));
    assert!(!compared(&altered("extra/distgpipe_export", "extra/distgpipe_expert")));
}

#[test]
fn a_truncated_archive_is_an_error() {
    for length in (0..SMALL.len()).step_by(97).chain(SMALL.len() - 30..SMALL.len()) {
        assert!(graph(&SMALL[..length]).is_err(), "{length}");
        assert!(weights(&SMALL[..length]).is_err(), "{length}");
    }
}

fn node(op: &str, args: Vec<(&str, Arg)>, modules: &[u32]) -> Node {
    let args = args.into_iter().map(|(name, arg)| (name.to_owned(), arg)).collect();
    Node { op: op.to_owned(), args, results: 1, modules: modules.to_vec(), no_grad: false }
}

fn value(dtype: TensorType, dims: &[Size]) -> ValueInfo {
    ValueInfo { dtype, dims: dims.to_vec() }
}

/// The copies once had their names in the order of use, so a head that is registered before its embedding swapped them.
#[test]
fn an_untied_parameter_has_the_name_of_the_module_that_uses_it() {
    let (embedding, head) = ("embedding.weight".to_owned(), "head.weight".to_owned());
    let graph = Graph::try_from(GraphParts {
        inputs: 1,
        states: vec![State { name: head.clone(), trained: true, tied: vec![embedding.clone()] }],
        modules: ["", "embedding", "head", "head@1"].map(str::to_owned).to_vec(),
        nodes: vec![
            node("embedding.default", vec![("weight", Arg::Tensor(1)), ("indices", Arg::Tensor(0))], &[0, 1]),
            node("linear.default", vec![("input", Arg::Tensor(2)), ("weight", Arg::Tensor(1))], &[0, 2]),
            node("linear.default", vec![("input", Arg::Tensor(2)), ("weight", Arg::Tensor(1))], &[0, 3]),
            node("add.Tensor", vec![("self", Arg::Tensor(3)), ("other", Arg::Tensor(4))], &[0]),
        ],
        values: vec![
            value(TensorType::I64, &[Size::BATCH, Size::Fixed(4)]),
            value(TensorType::F32, &[Size::Fixed(9), Size::Fixed(3)]),
            value(TensorType::F32, &[Size::BATCH, Size::Fixed(4), Size::Fixed(3)]),
            value(TensorType::F32, &[Size::BATCH, Size::Fixed(4), Size::Fixed(9)]),
            value(TensorType::F32, &[Size::BATCH, Size::Fixed(4), Size::Fixed(9)]),
            value(TensorType::F32, &[Size::BATCH, Size::Fixed(4), Size::Fixed(9)]),
        ],
        output: 5,
        ..GraphParts::default()
    });
    let graph = graph.unwrap();
    assert!(graph.used_again().is_empty(), "no cut is lost to it");
    let users = |layers: &[Layer]| layers.iter().filter(|layer| layer.states == [0]).count();
    assert_eq!(users(&graph.layers(Boundaries::All).unwrap()), 3, "each layer that uses it has it");
    let mut parts: GraphParts = graph.clone().into();
    parts.states[0].tied.clear();
    let called_again = Graph::try_from(parts).unwrap();
    assert_eq!(
        called_again.used_again(),
        [(head.clone(), 2)],
        "under one name, it rules out the cuts between its uses"
    );
    assert_eq!(users(&called_again.layers(Boundaries::All).unwrap()), 1);
    let untied = graph.untied().unwrap();
    let name = |node: &Node| untied.states[untied.state_of(node.tensor("weight").unwrap()).unwrap()].name.clone();
    assert_eq!(untied.nodes[..3].iter().map(name).collect::<Vec<_>>(), [embedding, head.clone(), head]);
    assert!(untied.states.iter().all(|state| state.tied.is_empty()));
}

/// A chain of `free` nodes that depend on no input, and `layers` layers that all need the end of it.
fn repeating(free: usize, layers: usize) -> Graph {
    let free_value = |nth: usize| (1 + nth) as u32;
    let mut nodes = vec![node("arange.default", vec![("end", Arg::Int(Size::Fixed(3)))], &[])];
    for nth in 1..free {
        let args = vec![("self", Arg::Tensor(free_value(nth - 1))), ("other", Arg::Int(Size::Fixed(1)))];
        nodes.push(node("add.Scalar", args, &[]));
    }
    for nth in 0..layers {
        let x = if nth == 0 { 0 } else { (free + nth) as u32 };
        nodes.push(node(
            "add.Tensor",
            vec![("self", Arg::Tensor(x)), ("other", Arg::Tensor(free_value(free - 1)))],
            &[],
        ));
    }
    let row = value(TensorType::F32, &[Size::BATCH, Size::Fixed(3)]);
    let mut values = vec![row.clone()];
    values.extend(std::iter::repeat_n(value(TensorType::F32, &[Size::Fixed(3)]), free));
    values.extend(std::iter::repeat_n(row, layers));
    let output = values.len() as u32 - 1;
    Graph::try_from(GraphParts { inputs: 1, nodes, values, output, ..GraphParts::default() }).unwrap()
}

/// Each of n layers may repeat n nodes, so a small file could ask for any amount of memory.
#[test]
fn what_layers_repeat_is_bounded() {
    let layers = repeating(30, 100).layers(Boundaries::All).unwrap();
    assert_eq!(layers.len(), 100);
    assert!(layers.iter().all(|layer| layer.nodes.len() == 31 && layer.nodes.is_sorted()));
    let refused = repeating(30_000, 30_000).layers(Boundaries::All).unwrap_err().to_string();
    assert!(refused.contains("at most 2^18 repeated computations"), "{refused}");
    assert_eq!(repeating(30_000, 30_000).layers(Boundaries::Modules).unwrap().len(), 1);
}

/// libtorch takes an integer as truth value, and would change the buffers of such a batch norm itself.
#[test]
fn arguments_that_switch_training_have_their_types() {
    let small: GraphParts = graph(SMALL).unwrap().into();
    let with = |op: &str, name: &str, arg: Arg| {
        let mut parts = small.clone();
        let node = parts.nodes.iter_mut().find(|node| node.op == op).unwrap();
        node.args.iter_mut().find(|(known, _)| known == name).unwrap().1 = arg;
        Graph::try_from(parts)
    };
    for (op, name, arg, said) in [
        ("batch_norm.default", "training", Arg::Int(Size::Fixed(1)), "a truth value"),
        ("batch_norm.default", "eps", Arg::None, "a fixed number"),
        ("batch_norm.default", "momentum", Arg::Int(Size::BATCH), "a fixed number"),
        ("batch_norm.default", "momentum", Arg::Float(Number(f64::NAN)), "a fixed number"),
        ("dropout.default", "p", Arg::Bool(true), "a fixed number"),
        ("dropout.default", "train", Arg::Float(Number(1.0)), "a truth value"),
    ] {
        let refused = with(op, name, arg).unwrap_err().to_string();
        assert!(refused.contains(said) && refused.contains(name), "{refused}");
    }
    assert!(with("batch_norm.default", "momentum", Arg::Float(Number(0.5))).is_ok());
    // A factory could take page-locked memory, which no limit of a server counts.
    let pinned = |pinned: bool| {
        let mut parts = small.clone();
        parts.nodes[0].args.push(("pin_memory".into(), Arg::Bool(pinned)));
        Graph::try_from(parts).err().map(|error| error.to_string())
    };
    assert!(pinned(true).is_some_and(|refused| refused.contains("pin_memory")));
    assert_eq!(pinned(false), None);
}

/// A graph says which operators outside of the list it uses, and whoever runs it decides.
#[test]
fn operators_outside_of_the_list_are_named() {
    let file = altered("torch.ops.aten.flatten.using_ints", "torch.ops.aten.sinc.default______");
    assert!(graph(&file).unwrap_err().to_string().contains("`aten.sinc.default______` in the model"));
    let name = "sinc.default______".to_owned();
    let allowed = [name.clone(), "relu.default".to_owned(), "never_used.default".to_owned()];
    let read = archive::graph_with(file.len() as u64, &mut reader(&file), &allowed).unwrap();
    assert_eq!(read.extra, [name], "those that it uses, and no others");
    let with = |extra: &[&str]| {
        let mut parts: GraphParts = read.clone().into();
        parts.extra = extra.iter().map(|&name| name.to_owned()).collect();
        Graph::try_from(parts).map(|graph| graph.layers(Boundaries::All).unwrap().len())
    };
    assert!(with(&["sinc.default______"]).is_ok());
    for wrong in [
        &[][..],
        &["sinc.default______", "relu.default"],
        &["sinc.default______"; 2],
        &["a::b.c", "sinc.default______"],
    ] {
        assert!(with(wrong).is_err(), "{wrong:?}");
    }
}

/// Whatever graph passes the checks can be cut without a panic.
fn cut(parts: GraphParts) {
    if let Ok(graph) = Graph::try_from(parts) {
        for boundaries in [Boundaries::Modules, Boundaries::All] {
            if let Ok(layers) = graph.layers(boundaries) {
                assert!(!layers.is_empty());
            }
        }
        let _ = graph.used_again();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(1500), ..ProptestConfig::default() })]

    #[test]
    fn mutated_archives_never_panic(changes in prop::collection::vec((0..SMALL.len(), any::<u8>()), 1..8)) {
        let mut file = SMALL.to_vec();
        for (at, byte) in changes {
            file[at] = byte;
        }
        if let Ok(graph) = graph(&file) {
            cut(graph.into());
        }
        let _ = weights(&file);
    }

    /// Changes numbers in the JSON of a graph, as a hostile driver could.
    #[test]
    fn mutated_graphs_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), 0..60_i64), 1..6)) {
        let mut text = serde_json::to_string(&graph(SMALL).unwrap()).unwrap();
        for (index, number) in changes {
            let digits: Vec<usize> = text.bytes().enumerate().filter(|(_, b)| b.is_ascii_digit()).map(|(i, _)| i).collect();
            let at = digits[index.index(digits.len())];
            text.replace_range(at..at + 1, &number.to_string());
        }
        if let Ok(parts) = serde_json::from_str::<GraphParts>(&text) {
            cut(parts);
        }
    }
}
