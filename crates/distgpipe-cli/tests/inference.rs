//! `distgpipe evaluate` and `predict`: a trained model is used without flags about it, and gives what the library gives.

mod command;

use command::{directory, distgpipe, ended, json, refused, tensors};
use distgpipe::data::glue::Task;
use distgpipe::data::image::ImageSource;
use distgpipe::data::{Dataset, Digits, Glue, ImageFiles, ImageSet, LoadPass, Split, Tokens};
use distgpipe::engine::Layout;
use distgpipe::tch::{Kind, Tensor};
use distgpipe::train::weights::{Entry, SafetensorsWriter};
use distgpipe::{zoo, Device, Model, Pipeline};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The same device and number of threads as in training.
const CPU: [&str; 4] = ["--threads", "1", "--device", "cpu"];

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../distgpipe/tests/golden").join(name)
}

/// The probabilities that the library computes for all rows of a data set, with the weights of a file.
fn expected(model: Model, weights: &Path, data: &dyn Dataset) -> Vec<Vec<f32>> {
    let mut pipeline = Pipeline::builder(model).device(Device::Cpu).threads(1).build().expect("a pipeline");
    let names = tensors(weights).into_iter().map(|(name, tensor)| (name.replace("roberta.", ""), tensor));
    pipeline.load_state(&names.collect()).expect("the weights of this model");
    let rows: Vec<usize> = (0..data.len()).collect();
    let batch = data.batch(&rows, LoadPass::new(0, 0)).expect("rows");
    let probabilities = pipeline.predict(batch.inputs).expect("predictions").softmax(-1, Kind::Float);
    (0..data.len()).map(|row| Vec::try_from(probabilities.get(row as i64)).expect("numbers")).collect()
}

/// The probabilities in what `predict --json` printed, by class number.
fn probabilities(outcome: &Value) -> Vec<f32> {
    let classes = outcome["classes"].as_array().expect("classes");
    let mut by_number: Vec<(u64, f32)> = classes
        .iter()
        .map(|class| (class["number"].as_u64().unwrap(), class["probability"].as_f64().unwrap() as f32))
        .collect();
    assert!(by_number.is_sorted_by(|a, b| a.1 >= b.1), "the most probable first: {outcome}");
    by_number.sort_by_key(|(number, _)| *number);
    by_number.into_iter().map(|(_, probability)| probability).collect()
}

fn assert_near(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let near = got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5);
    assert!(near, "{what}: {got:?} instead of {expected:?}");
}

fn model(name: &str, settings: Value) -> Model {
    zoo::build(&distgpipe::ModelSpec { name: name.to_owned(), settings }).expect("a model")
}

/// Two classes of images in all forms, of which four are test images of different sizes.
fn images(root: &Path) {
    for (part, class, file) in [
        ("train", "cat", "plain.jpg"),
        ("train", "cat", "plain.png"),
        ("train", "dog", "grey.jpg"),
        ("train", "dog", "alpha.png"),
        ("test", "cat", "subsampled.jpg"),
        ("test", "cat", "progressive.jpg"),
        ("test", "dog", "palette.png"),
        ("test", "dog", "grey_alpha.png"),
    ] {
        let folder = root.join(part).join(class);
        std::fs::create_dir_all(&folder).expect("created");
        std::fs::copy(golden("images").join(file), folder.join(file)).expect("copied");
    }
}

/// A model from PyTorch is no different: it trains on the images, is saved, evaluates and predicts.
#[test]
fn images_are_classified_by_a_model_from_pytorch() {
    let root = directory("inference/exported");
    images(&root);
    let weights = root.join("model.safetensors");
    let file = golden("pt2/mobilenet_v2.pt2");
    let data = ["--model", text(&file), "--data", "image-folder", "--data-dir", text(&root)];
    let run = ["--batch", "4", "--chunks", "2", "--epochs", "8", "--lr", "0.05", "--save", text(&weights), "--json"];
    let trained = json(&[&["train"], &data[..], &run].concat());
    let model = zoo::Exported::open(&file).expect("a model");
    let source = ImageFiles::folder(&root, Split::Test).expect("images");
    let test = ImageSet::for_input(source, &model.input, Split::Test, Layout::ChannelsLast).expect("a square image");
    let expected = expected(model, &weights, &test);
    let apart = expected.windows(2).all(|rows| rows[0].iter().zip(&rows[1]).any(|(a, b)| (a - b).abs() > 1e-4));
    assert!(apart, "the model tells the images apart: {expected:?}");
    let folders = ["cat", "dog"].map(|class| root.join("test").join(class));
    let inputs = [text(&folders[0]), text(&folders[1])];
    for more in [&[][..], &["--cut", "after=features.2", "--workers", "processes"]] {
        let outcomes = json(&[&["predict", "--weights", text(&weights), "--json"], &CPU[..], more, &inputs].concat());
        let outcomes = outcomes.as_array().expect("a list");
        assert_eq!(outcomes.len(), expected.len());
        for (outcome, expected) in outcomes.iter().zip(&expected) {
            let shown = outcome["classes"].as_array().expect("classes");
            assert!(!shown.is_empty());
            for class in shown {
                let number = class["number"].as_u64().expect("a number") as usize;
                let got = class["probability"].as_f64().expect("a number") as f32;
                assert!((got - expected[number]).abs() < 1e-5, "{more:?}: {outcome} instead of {expected:?}");
            }
        }
    }
    let scores = json(&[&["evaluate", "--weights", text(&weights), "--json"], &CPU[..]].concat());
    let last = trained["epochs"].as_array().and_then(|epochs| epochs.last()).expect("epochs");
    assert_eq!((&scores["rows"], &scores["accuracy"]), (&4.into(), &last["test_accuracy"]));
}

/// The preprocessing of the test images, names of classes, folders in order, and inputs that cannot be read.
#[test]
fn images_are_classified_as_the_test_loader_and_the_library_do() {
    let root = directory("inference/images");
    images(&root);
    let weights = root.join("model.safetensors");
    // Each pixel counts, so that other preprocessing gives other probabilities.
    let set = ["--set", "input=[3,32,32]", "--set", "hidden=[16]", "--set", "classes=2", "--set", "dropout=0.0"];
    let data = ["--model", "mlp", "--data", "image-folder", "--data-dir", text(&root)];
    let run = ["--batch", "4", "--chunks", "2", "--epochs", "8", "--lr", "0.005", "--save", text(&weights), "--json"];
    let trained = json(&[&["train"], &set[..], &data, &run].concat());

    let source = ImageFiles::folder(&root, Split::Test).expect("images");
    assert_eq!(source.class_names().expect("names"), ["cat", "dog"]);
    let model = model("mlp", serde_json::json!({"input": [3, 32, 32], "hidden": [16], "classes": 2}));
    let test = ImageSet::for_input(source, &model.input, Split::Test, Layout::ChannelsLast).expect("a square image");
    let expected = expected(model, &weights, &test);
    let apart = expected.windows(2).all(|rows| (rows[0][0] - rows[1][0]).abs() > 1e-3);
    assert!(apart, "the model tells the images apart: {expected:?}");

    let folders = ["cat", "dog"].map(|class| root.join("test").join(class));
    let predict = ["predict", "--weights", text(&weights), "--json"];
    let inputs = [text(&folders[0]), text(&folders[1])];
    let through_processes = ["--partitions", "2", "--workers", "processes", "--batch", "3"];
    for more in [&[][..], &through_processes] {
        let outcomes = json(&[&predict[..], &CPU, more, &inputs].concat());
        let outcomes = outcomes.as_array().expect("a list");
        let names: Vec<&str> = outcomes.iter().map(|outcome| outcome["input"].as_str().expect("text")).collect();
        let files = ["cat/progressive.jpg", "cat/subsampled.jpg", "dog/grey_alpha.png", "dog/palette.png"];
        assert_eq!(names, files.map(|file| root.join("test").join(file).display().to_string()));
        for (outcome, expected) in outcomes.iter().zip(&expected) {
            assert_near(&probabilities(outcome), expected, &format!("{more:?}: {outcome}"));
            let best = outcome["classes"][0]["class"].as_str().expect("text");
            assert_eq!(best, if expected[0] >= expected[1] { "cat" } else { "dog" });
        }
    }
    let scores = json(&[&["evaluate", "--weights", text(&weights), "--json"], &CPU[..]].concat());
    let last = trained["epochs"].as_array().and_then(|epochs| epochs.last()).expect("epochs");
    assert_eq!((&scores["rows"], &scores["accuracy"]), (&4.into(), &last["test_accuracy"]));

    // What cannot be read is reported, and the rest is classified.
    let empty = root.join("empty");
    std::fs::create_dir_all(&empty).expect("created");
    let [page, pipe, cut] = ["page.jpg", "pipe.jpg", "cut.jpg"].map(|name| root.join(name));
    std::fs::write(&page, "<html>").expect("written");
    let whole = std::fs::read(golden("images/plain.jpg")).expect("an image");
    std::fs::write(&cut, &whole[..whole.len() / 2]).expect("written");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let good = folders[1].join("palette.png");
    let given = [&page, &good, &pipe, &empty, &cut, &root.join("missing.png")];
    let given: Vec<&str> = given.iter().map(|path| text(path)).collect();
    let (out, said) = ended(1, &[&["predict", "--weights", text(&weights), "--top", "1"], &CPU[..], &given].concat());
    assert!(out.lines().count() == 1 && out.contains("palette.png: ") && out.ends_with(" %\n"), "{out}");
    for words in [
        "page.jpg, byte 0: expected a JPEG or PNG image",
        "pipe.jpg: expected a regular file, got a pipe",
        "empty: there is no image",
        "cut.jpg, byte ",
        "missing.png: No such file",
        "error: 5 of 6 inputs could not be classified",
    ] {
        assert!(said.contains(words), "expected `{words}` in: {said}");
    }
    // A program finds the outcomes in the order of the arguments.
    let given = [&given[3..], &given[..3], &[text(&folders[0])]].concat();
    let (out, _) = ended(1, &[&predict[..], &CPU, &["--batch", "2"], &given].concat());
    let outcomes: Vec<Value> = serde_json::from_str(&out).expect("JSON");
    let names: Vec<&str> = outcomes.iter().map(|outcome| outcome["input"].as_str().expect("text")).collect();
    let in_folder = ["progressive.jpg", "subsampled.jpg"].map(|file| folders[0].join(file).display().to_string());
    assert_eq!(names, [&given[..6], &[&in_folder[0], &in_folder[1]]].concat());
    let failed: Vec<bool> = outcomes.iter().map(|outcome| outcome["error"].is_string()).collect();
    assert_eq!(failed, [true, true, true, true, false, true, false, false]);
    // Data with other classes cannot be compared with the model's scores.
    let other = directory("inference/others");
    images(&other);
    for part in ["train", "test"] {
        std::fs::rename(other.join(part).join("dog"), other.join(part).join("wolf")).expect("renamed");
    }
    let said = refused(2, &["evaluate", "--weights", text(&weights), "--data-dir", text(&other)]);
    assert!(said.contains("test/wolf: the model has no such class: use data with the classes"), "{said}");
    // Only the test images are needed, and those of each class keep its number if another class has none.
    let evaluate =
        [&["evaluate", "--weights", text(&weights), "--data-dir", text(&other), "--json"], &CPU[..]].concat();
    std::fs::remove_dir_all(other.join("train")).expect("removed");
    std::fs::rename(other.join("test/wolf"), other.join("test/dog")).expect("renamed");
    assert_eq!(json(&evaluate)["accuracy"], scores["accuracy"]);
    std::fs::remove_dir_all(other.join("test/cat")).expect("removed");
    let (out, said) = ended(0, &evaluate);
    let dogs = expected[2..].iter().filter(|row| row[1] > row[0]).count() as f64 / 2.0;
    assert_eq!(serde_json::from_str::<Value>(&out).expect("JSON")["accuracy"], dogs);
    assert!(said.contains("test has no images of 1 class: cat"), "{said}");
}

/// A black and white PNG of 8 × 8 pixels.
/// A model sees the colours that it was trained on, also where nobody repeats the flag.
#[test]
fn images_are_normalised_as_in_training() {
    let root = directory("inference/normalised");
    images(&root);
    let weights = root.join("model.safetensors");
    let set = ["--set", "input=[3,32,32]", "--set", "hidden=[16]", "--set", "classes=2", "--set", "dropout=0.0"];
    let data = ["--model", "mlp", "--data", "image-folder", "--data-dir", text(&root)];
    let colours = ["--normalise", "0.5,0.4,0.3/0.5,0.6,0.7"];
    let run = ["--batch", "4", "--chunks", "2", "--epochs", "8", "--lr", "0.005", "--save", text(&weights), "--json"];
    let trained = json(&[&["train"], &set[..], &data, &colours, &run].concat());

    let source = ImageFiles::folder(&root, Split::Test).expect("images");
    let model = model("mlp", serde_json::json!({"input": [3, 32, 32], "hidden": [16], "classes": 2}));
    let test = ImageSet::for_input(source, &model.input, Split::Test, Layout::ChannelsLast).expect("a square image");
    let test = test.normalised_by([0.5, 0.4, 0.3], [0.5, 0.6, 0.7]).expect("deviations above 0");
    let expected = expected(model, &weights, &test);
    let folders = ["cat", "dog"].map(|class| root.join("test").join(class));
    let predict = ["predict", "--weights", text(&weights), "--json", text(&folders[0]), text(&folders[1])];
    let outcomes = json(&[&predict[..], &CPU].concat());
    for (outcome, expected) in outcomes.as_array().expect("a list").iter().zip(&expected) {
        assert_near(&probabilities(outcome), expected, &outcome.to_string());
    }
    let evaluate = [&["evaluate", "--weights", text(&weights), "--json"], &CPU[..]].concat();
    let last = trained["epochs"].as_array().and_then(|epochs| epochs.last()).expect("epochs");
    // To rounding: the run had other micro-batches.
    let [now, then] = [&json(&evaluate)["loss"], &last["test_loss"]].map(|loss| loss.as_f64().expect("a loss"));
    assert!((now - then).abs() < 1e-5 * then, "{now} {then}");
    let said = refused(2, &[&evaluate[..], &["--normalise", "imagenet"]].concat());
    assert!(said.contains("the model was trained on colours with mean [0.5"), "{said}");
}

fn write_png(path: &Path, side: u32, pixels: &[u8]) {
    let file = std::io::BufWriter::new(std::fs::File::create(path).expect("created"));
    let mut encoder = png::Encoder::new(file, side, side);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.write_header().and_then(|mut writer| writer.write_image_data(pixels)).expect("written");
}

#[test]
fn a_saved_model_says_what_it_is_and_evaluates_to_the_figures_of_its_run() {
    let root = directory("inference/digits");
    let (weights, saved) = (root.join("model.safetensors"), root.join("saved"));
    let run = ["--set", "hidden=[32]", "--epochs", "2", "--save", text(&weights), "--checkpoint", text(&saved)];
    let trained = json(&[&["train", "--json"], &run[..]].concat());
    let last = &trained["epochs"][1];

    // The reference implementation of the format reads the file, and its metadata.
    let bytes = std::fs::read(&weights).expect("saved");
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).expect("a safetensors file");
    let metadata = header.metadata().as_ref().expect("metadata");
    let about: Value = serde_json::from_str(&metadata["distgpipe"]).expect("JSON");
    assert_eq!((&about["model"]["name"], &about["model"]["settings"]["hidden"][0]), (&"mlp".into(), &32.into()));
    assert_eq!((&about["flags"]["data"], &about["classes"][9]), (&"digits".into(), &"9".into()));
    assert_eq!(metadata["format"], "pt");

    // In the same micro-batches the figures are the same to the bit.
    let evaluate = |weights: &Path, more: &[&str]| {
        let common = ["evaluate", "--weights", text(weights), "--chunks", "4", "--json"];
        json(&[&common[..], &CPU, more].concat())
    };
    let pipeline = ["--partitions", "2", "--workers", "processes"];
    let step = saved.join("step-00000044");
    for (weights, more) in [(&weights, &[][..]), (&weights, &pipeline), (&saved, &[]), (&step, &[])] {
        let scores = evaluate(weights, more);
        assert_eq!((&scores["loss"], &scores["accuracy"]), (&last["test_loss"], &last["test_accuracy"]), "{more:?}");
        assert_eq!((&scores["rows"], &scores["data"]), (&360.into(), &"digits".into()));
    }
    assert_eq!(evaluate(&weights, &["--limit", "50"])["rows"], 50);

    // The optimizer's state is for training alone.
    let optimizer = step.join("optimizer.safetensors");
    let state = std::fs::read(&optimizer).expect("saved");
    std::fs::write(&optimizer, "damaged").expect("written");
    assert_eq!(evaluate(&step, &[])["loss"], last["test_loss"]);
    std::fs::write(&optimizer, &state).expect("written");

    // The checkpoint before a damaged one counts, as when a run resumes.
    let file = step.join("model.safetensors");
    let whole = std::fs::read(&file).expect("saved");
    std::fs::write(&file, &whole[..whole.len() / 2]).expect("written");
    let (out, said) = ended(0, &["evaluate", "--weights", text(&saved), "--chunks", "4", "--json", "--threads", "1"]);
    let scores: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(scores["loss"], trained["epochs"][0]["test_loss"], "{said}");
    assert!(said.contains("warning: skipping a damaged checkpoint: ") && said.contains("step-00000044"), "{said}");
    assert!(refused(2, &["evaluate", "--weights", text(&step)]).contains("is corrupt"));
    std::fs::write(saved.join("step-00000022/checkpoint.json"), "{}").expect("written");
    let said = refused(2, &["evaluate", "--weights", text(&saved)]);
    assert!(said.contains("none of its checkpoints can be used, for the reasons above"), "{said}");
    std::fs::write(&file, &whole).expect("written");

    // The digits as files, one of the wrong size among them.
    let files = root.join("files");
    std::fs::create_dir_all(&files).expect("created");
    let model = model("mlp", serde_json::json!({"hidden": [32]}));
    let test = Digits::for_input(Split::Test, &model.input).expect("digits");
    let (mean, deviation) = Digits::normalisation().expect("statistics");
    let batch = test.batch(&[0, 1, 2, 3, 4, 5, 6, 7], LoadPass::new(0, 0)).expect("rows");
    for row in 0..8 {
        let values = Vec::<f32>::try_from(batch.inputs[0].get(row).flatten(0, -1)).expect("numbers");
        let ink = values.iter().map(|&value| (f64::from(value) * deviation + mean).round());
        let pixels: Vec<u8> = ink.map(|ink| (ink * 255.0 / 16.0).round() as u8).collect();
        write_png(&files.join(format!("{row}.png")), 8, &pixels);
    }
    let predict = [&["predict", "--weights", text(&weights), "--json", "--top", "10"], &CPU[..]].concat();
    let outcomes = json(&[&predict[..], &[text(&files)]].concat());
    let expected = expected(model, &weights, &test);
    for (row, outcome) in outcomes.as_array().expect("a list").iter().enumerate() {
        assert_near(&probabilities(outcome), &expected[row], &format!("digit {row}"));
    }
    let large = root.join("large.png");
    write_png(&large, 16, &[0; 256]);
    let said = ended(1, &[&predict[..], &[text(&large)]].concat()).1;
    assert!(said.contains("large.png: expected an image of 8 × 8 pixels, as the digits are, got 16 × 16"), "{said}");
}

#[test]
fn flags_that_contradict_the_file_and_files_that_say_nothing_are_errors() {
    let root = directory("inference/flags");
    let [weights, bare] = ["model", "bare"].map(|name| root.join(format!("{name}.safetensors")));
    let trained = json(&["train", "--set", "hidden=[16]", "--epochs", "1", "--save", text(&weights), "--json"]);
    let all = tensors(&weights);
    let entries = all.iter().map(|(name, tensor)| Entry::new(name, tensor.kind(), &tensor.size())).collect();
    let mut writer = SafetensorsWriter::create(&bare, entries, &BTreeMap::new()).expect("created");
    all.values().try_for_each(|tensor: &Tensor| writer.write(tensor)).expect("written");
    writer.finish().expect("written");

    let described = ["--model", "mlp", "--set", "hidden=[16]", "--data", "digits"];
    let scores = json(&[&["evaluate", "--weights", text(&bare), "--json"], &described[..], &CPU].concat());
    assert_eq!(scores["accuracy"], trained["epochs"][0]["test_accuracy"]);
    let garbage = root.join("garbage.safetensors");
    std::fs::write(&garbage, "no weights").expect("written");
    let empty = root.join("empty");
    std::fs::create_dir_all(&empty).expect("created");
    let (w, b) = (text(&weights), text(&bare));
    for (arguments, words) in [
        (&["evaluate"][..], &["add --weights FILE"][..]),
        (&["evaluate", "--weights", b], &["does not say which model", "--model NAME", "--set KEY=VALUE"]),
        (&["evaluate", "--weights", b, "--model", "mlp", "--set", "hidden=[16]"], &["add --data NAME"]),
        (&["evaluate", "--weights", b, "--model", "mlp", "--data", "digits"], &["does not fit the model"]),
        (&["evaluate", "--weights", w, "--model", "vgg13"], &["--model vgg13", "those of mlp"]),
        (&["evaluate", "--weights", w, "--set", "hidden=[8]"], &["does not fit the model"]),
        (&["evaluate", "--weights", w, "--set", "classes=9"], &["2 of the wrong shape", "rename the tensors:"]),
        (&["evaluate", "--weights", w, "--lr", "1"], &["--lr", "no such flag"]),
        (&["evaluate", "--weights", w, "--chunks", "0"], &["--chunks", "use 1 or more"]),
        (&["evaluate", "--weights", text(&garbage)], &["--weights", "garbage.safetensors"]),
        (&["evaluate", "--weights", text(&empty)], &["a directory without checkpoints"]),
        (&["predict", "--weights", w], &["name an image"]),
        (&["predict", "--weights", w, "--top", "0", "x.png"], &["--top 0"]),
        (&["predict", "--weights", w, "--data", "cifar10", "x.png"], &["trained on digits", "remove the flag"]),
        (&["predict", "--weights", b, "--model", "mlp", "--set", "hidden=[16]", "x.png"], &["does not take images"]),
    ] {
        let said = refused(2, arguments);
        for word in words {
            assert!(said.contains(word), "{arguments:?}: expected `{word}` in: {said}");
        }
    }
    // What to change is the data: the model is what it is.
    let photos = root.join("photos");
    images(&photos);
    let said = refused(2, &["evaluate", "--weights", w, "--data", "image-folder", "--data-dir", text(&photos)]);
    assert!(said.contains("--data image-folder: it has images of 3 channels"), "{said}");
    assert!(said.contains("use data of the kind that the model was trained on") && !said.contains("--model"), "{said}");
    let unet = root.join("unet.safetensors");
    let small = ["--set", "image=16", "--set", "channels=4", "--set", "convolutions=1", "--set", "depth=2"];
    let data = ["--data", "synthetic", "--samples", "32", "--batch", "32", "--epochs", "2", "--save", text(&unet)];
    let trained = json(&[&["train", "--model", "unet", "--json"], &small[..], &data].concat());
    let scores = json(&[&["evaluate", "--weights", text(&unet), "--json"], &CPU[..]].concat());
    let last = trained["epochs"][1]["test_loss"].as_f64().expect("a number");
    assert!((scores["loss"].as_f64().expect("a number") - last).abs() < 1e-5, "{scores}: {last}");
    assert!(refused(2, &["predict", "--weights", text(&unet), "x.png"]).contains("no classes to predict"));
}

#[test]
fn pairs_of_sentences_are_classified_as_the_library_does() {
    let root = directory("inference/text");
    let (data, tokenizer, weights) = (root.join("RTE"), root.join("tokenizer"), root.join("model.safetensors"));
    for folder in [&data, &tokenizer] {
        std::fs::create_dir_all(folder).expect("created");
    }
    std::fs::copy(golden("tokenizer/tokenizer.json"), tokenizer.join("tokenizer.json")).expect("copied");
    for (file, rows) in [("train.tsv", 2490), ("dev.tsv", 277)] {
        // The second sentence gives the answer, so that a small model learns it and the probabilities differ.
        let rest = |i: usize| ["Day by day.\tentailment", "The facts.\tnot_entailment"][i % 2];
        let rows: String = (0..rows).map(|i| format!("{i}\tThe facts are {i}.\t{}\n", rest(i))).collect();
        std::fs::write(data.join(file), format!("index\tsentence1\tsentence2\tlabel\n{rows}")).expect("written");
    }
    let settings = ["vocabulary=400", "hidden=8", "heads=2", "layers=1", "feed_forward=8", "tokens=32", "positions=34"];
    let mut train = vec!["train", "--data", "rte", "--data-dir", text(&root), "--model", "roberta"];
    settings.iter().chain(&["classes=2"]).for_each(|setting| train.extend(["--set", setting]));
    train.extend(["--tokenizer", text(&tokenizer), "--limit", "32", "--batch", "32", "--epochs", "30"]);
    train.extend(["--optimizer", "adam", "--lr", "0.01"]);
    ended(0, &[&train[..], &["--save", text(&weights)]].concat());

    let settings = serde_json::json!({"vocabulary": 400, "hidden": 8, "heads": 2, "layers": 1, "feed_forward": 8,
        "tokens": 32, "positions": 34, "classes": 2});
    let tokens = Tokens::open(&tokenizer, 32).expect("a tokenizer");
    let rte = Glue::open(&root, Task::Rte, Split::Test, &tokens).expect("rows");
    let expected = expected(model("roberta", settings), &weights, &rte);
    let predict = [&["predict", "--weights", text(&weights)], &CPU[..]].concat();
    assert!((expected[0][0] - expected[17][0]).abs() > 1e-3, "{:?} {:?}", expected[0], expected[17]);
    let pairs = ["The facts are 0. ||| Day by day.", "The facts are 17.|||The facts."];
    let outcomes = json(&[&predict[..], &["--json"], &pairs].concat());
    for (outcome, row) in [(&outcomes[0], 0), (&outcomes[1], 17)] {
        assert_near(&probabilities(outcome), &expected[row], &outcome.to_string());
    }
    let (out, said) = ended(1, &[&predict[..], &["The facts are 0.", pairs[0]]].concat());
    assert!(out.starts_with(pairs[0]) && out.contains("entailment "), "{out}");
    assert!(said.contains("expected two sentences with `|||` between them"), "{said}");
    let outcomes_of = |given: [&str; 2]| {
        let (out, _) = ended(1, &[&predict[..], &["--json"], &given].concat());
        let outcomes: Vec<Value> = serde_json::from_str(&out).expect("JSON");
        outcomes.iter().map(|outcome| outcome["input"].as_str().expect("text").to_owned()).collect::<Vec<_>>()
    };
    for given in [["The facts are 0.", pairs[0]], [pairs[0], "The facts are 0."]] {
        assert_eq!(outcomes_of(given), given);
    }
    // The tokenizer was moved.
    let moved = root.join("moved");
    std::fs::rename(&tokenizer, &moved).expect("renamed");
    assert!(refused(2, &[&predict[..], &[pairs[0]]].concat()).contains("--tokenizer: "));
    let again = json(&[&predict[..], &["--json", "--tokenizer", text(&moved), pairs[0]]].concat());
    assert_eq!(again[0], outcomes[0]);
}

/// A reader that closes the pipe is no failure, as with every command.
#[test]
fn a_closed_output_ends_a_prediction_quietly() {
    let root = directory("inference/closed");
    let weights = root.join("model.safetensors");
    ended(0, &["train", "--set", "hidden=[8]", "--epochs", "1", "--save", text(&weights)]);
    write_png(&root.join("a.png"), 8, &[0; 64]);
    let mut child = distgpipe(&["predict", "--weights", text(&weights), text(&root)]).spawn().expect("it starts");
    drop(child.stdout.take());
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}
