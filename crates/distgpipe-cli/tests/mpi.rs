//! `mpirun distgpipe train`: the ranks are the workers, and whatever happens to one of them, mpirun ends soon and rank 0 says why.

mod archives;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// After a cause, everything must have ended within this. Most of it is for a busy machine.
const BOUND: Duration = Duration::from_secs(30);

const BINARY: &str = env!("CARGO_BIN_EXE_distgpipe");

/// Two partitions on the CPU, one thread each.
const TRAIN: [&str; 7] = ["train", "--partitions", "2", "--device", "cpu", "--threads", "1"];

/// A run that takes minutes unless something ends it.
const SLOW: [&str; 5] = ["--faults", "w0>w1:delay=20@0", "--epochs", "50", "--no-evaluate"];

fn mpirun(ranks: usize, arguments: &[&str]) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--oversubscribe", "--allow-run-as-root", "-n", &ranks.to_string(), BINARY]).args(arguments);
    command
}

/// Runs the command to its end; returns its exit status and what it wrote to standard error.
fn ended(mut command: Command) -> (Option<i32>, String) {
    let output = command.output().expect("mpirun starts: install Open MPI (Debian, Ubuntu: openmpi-bin)");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The losses of a run's log, by step.
fn losses(log: &Path) -> BTreeMap<u64, String> {
    let lines = std::fs::read_to_string(log.join("steps.jsonl")).expect("a log");
    let step = |line: &str| {
        let step: serde_json::Value = serde_json::from_str(line).expect("JSON");
        (step["kind"] == "step").then(|| (step["step"].as_u64().expect("a number"), step["loss"].to_string()))
    };
    lines.lines().filter_map(step).collect()
}

/// A folder of its own for a test.
fn folder(name: &str) -> std::path::PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("mpi-{name}"));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

#[test]
fn four_ranks_train_as_four_threads_do() {
    let folder = folder("transparent");
    let of = |name: &str, command: Command| {
        let mut command = command;
        let (status, said) = ended({
            command.arg("--log").arg(folder.join(name));
            command
        });
        assert_eq!(status, Some(0), "{said}");
        losses(&folder.join(name))
    };
    let arguments =
        ["train", "--partitions", "2", "--replicas", "2", "--device", "cpu", "--threads", "1", "--steps", "8"];
    let mut threads = Command::new(BINARY);
    threads.args(arguments);
    let (threads, ranks) = (of("threads", threads), of("ranks", mpirun(4, &arguments)));
    assert_eq!(threads.len(), 8);
    assert_eq!(ranks, threads);
    // As with a library that threads may only call one at a time.
    let mut serialized = mpirun(4, &arguments);
    serialized.env("DISTGPIPE_MPI_SERIALIZED", "1");
    assert_eq!(of("serialized", serialized), threads);
}

/// The ranks learn from rank 0 which operators its user allows.
#[test]
fn ranks_train_a_model_from_pytorch_as_threads_do() {
    let folder = folder("exported");
    let [plain, other] = archives::exported(&folder);
    let run =
        ["train", "--cut", "first=2,last=1", "--place", "a,b,a", "--limit", "64", "--batch", "16", "--chunks", "2"];
    let run = [&run[..], &["--steps", "4", "--no-evaluate", "--device", "cpu", "--threads", "1"]].concat();
    for (name, model, allow) in [("plain", plain, &[][..]), ("allowed", other.clone(), &["--allow-op", "sinc.default"])]
    {
        // The flag may stand before the command, too.
        let arguments = [allow, &run, &["--model", &model]].concat();
        let of = |mut command: Command, kind: &str| {
            let log = folder.join(format!("{name}-{kind}"));
            let (status, said) = ended({
                command.arg("--log").arg(&log);
                command
            });
            assert_eq!(status, Some(0), "{said}");
            // One run, and not one of each rank.
            assert_eq!(said.matches("device cpu").count(), 1, "{said}");
            losses(&log)
        };
        let mut threads = Command::new(BINARY);
        threads.args(&arguments);
        let (threads, ranks) = (of(threads, "threads"), of(mpirun(2, &arguments), "ranks"));
        assert_eq!(threads.len(), 4);
        assert_eq!(ranks, threads, "{name}");
    }
    let (status, said) = ended(mpirun(2, &[&run[..], &["--model", &other]].concat()));
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("--allow-op"), "{said}");
}

/// The order of MPI's additions is its own, so the losses are those of the ring up to rounding.
#[test]
fn mpi_sums_the_gradients_of_four_ranks_if_it_is_told_to() {
    let folder = folder("reduce");
    let arguments = ["train", "--replicas", "4", "--chunks", "1", "--device", "cpu", "--threads", "1", "--steps", "8"];
    let of = |reduce: &str| {
        let log = folder.join(reduce);
        let more = ["--reduce", reduce, "--log", log.to_str().expect("UTF-8")];
        let (status, said) = ended(mpirun(4, &[&arguments[..], &more].concat()));
        assert_eq!(status, Some(0), "{said}");
        losses(&log)
    };
    let (ring, mpi) = (of("ring"), of("mpi"));
    assert_eq!((ring.len(), mpi.len()), (8, 8));
    for (step, ring) in ring {
        let [ring, mpi]: [f64; 2] = [&ring, &mpi[&step]].map(|loss| loss.parse().expect("a number"));
        assert!((ring - mpi).abs() < 1e-4 * ring, "step {step}: {ring} {mpi}");
    }
    let (status, said) = ended(mpirun(4, &[&arguments[..], &["--reduce", "mpi", "--codec-replicas", "bf16"]].concat()));
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("--reduce: MPI sums 32-bit values, so --codec-replicas must be raw; got bf16"), "{said}");
}

/// The other ranks wait for it in MPI's sum.
#[test]
fn a_rank_that_errs_before_it_has_summed_its_gradients_is_named_and_ends_all() {
    let start = Instant::now();
    let flags = ["--replicas", "2", "--reduce", "mpi", "--faults", "w1/1:error@1B1"];
    let (status, said) = ended(mpirun(4, &[&TRAIN[..], &flags].concat()));
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("error: w1/1 failed while running 1B1: injected fault"), "{said}");
    assert!(start.elapsed() < BOUND, "took {:?}", start.elapsed());
}

/// The others wait for it inside MPI_Iallreduce: gradients are most of what these ranks do.
#[test]
fn a_rank_that_is_stopped_in_a_run_with_sums_by_mpi_is_named_and_ends_all() {
    let train = [
        "train",
        "--set",
        "hidden=[1500,1500]",
        "--replicas",
        "3",
        "--chunks",
        "1",
        "--device",
        "cpu",
        "--threads",
        "1",
    ];
    let sum = ["--reduce", "mpi", "--epochs", "1000", "--no-evaluate", "--peer-timeout", "5"];
    let run = Running::start(mpirun(3, &[&train[..], &sum].concat()), "epoch 1/");
    signal(run.rank(1), "-STOP");
    let (status, said) = run.ended();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("error: lost the connection to w0/1: nothing arrived for 5.0 s"), "{said}");
}

/// The command's standard output as JSON.
fn json(mut command: Command) -> serde_json::Value {
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn ranks_evaluate_and_predict_as_threads_do() {
    let folder = folder("inference");
    let weights = folder.join("model.safetensors");
    let weights = weights.to_str().expect("UTF-8");
    let mut train = Command::new(BINARY);
    train.args(TRAIN).args(["--epochs", "1", "--no-evaluate", "--save", weights]);
    let (status, said) = ended(train);
    assert_eq!(status, Some(0), "{said}");
    let image = folder.join("digit.png");
    let file = std::io::BufWriter::new(std::fs::File::create(&image).expect("created"));
    let mut encoder = png::Encoder::new(file, 8, 8);
    encoder.set_color(png::ColorType::Grayscale);
    let pixels: Vec<u8> = (0..64).map(|i| i * 4).collect();
    encoder.write_header().and_then(|mut writer| writer.write_image_data(&pixels)).expect("written");
    let common =
        ["--weights", weights, "--partitions", "2", "--chunks", "2", "--device", "cpu", "--threads", "1", "--json"];
    for command in [vec!["evaluate"], vec!["predict", image.to_str().expect("UTF-8")]] {
        let arguments = [&command[..], &common].concat();
        let mut threads = Command::new(BINARY);
        threads.args(&arguments);
        let figures = |said: serde_json::Value| match command[0] {
            "evaluate" => vec![said["rows"].clone(), said["loss"].clone(), said["accuracy"].clone()],
            _ => vec![said[0]["classes"].clone()],
        };
        let (threads, ranks) = (figures(json(threads)), figures(json(mpirun(2, &arguments))));
        assert!(threads.iter().all(|figure| !figure.is_null()), "{command:?}: {threads:?}");
        assert_eq!(ranks, threads, "{command:?}");
        // A number that does not fit is refused as in training.
        let (status, said) = ended(mpirun(3, &arguments));
        assert_eq!(status, Some(2), "{said}");
        assert!(said.contains("expected 2 MPI ranks"), "{said}");
    }
}

#[test]
fn a_number_of_ranks_that_does_not_fit_is_refused_with_the_one_that_does() {
    let (status, said) = ended(mpirun(3, &TRAIN));
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("error: expected 2 MPI ranks") && said.contains("`mpirun -n 2`"), "{said}");
    for [flag, value] in [["--workers", "threads"], ["--workers", "processes"], ["--server", "gpu-box"]] {
        let (status, said) = ended(mpirun(2, &[&TRAIN[..], &[flag, value]].concat()));
        assert_eq!(status, Some(2), "{said}");
        let named = if flag == "--server" { flag.to_owned() } else { format!("{flag} {value}") };
        assert!(said.contains(&format!("error: {named}: MPI has started 2 ranks")), "{said}");
    }
}

#[test]
fn a_rank_that_errs_is_named_and_ends_all() {
    let start = Instant::now();
    let (status, said) = ended(mpirun(2, &[&TRAIN[..], &["--faults", "w1:error@1F1"]].concat()));
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("error: w1 failed while running 1F1: injected fault"), "{said}");
    assert!(start.elapsed() < BOUND, "took {:?}", start.elapsed());
}

/// A run under mpirun that is in the middle of its steps.
struct Running {
    mpirun: Child,
    said: BufReader<std::process::ChildStderr>,
    text: String,
}

impl Running {
    fn start(mut command: Command, until: &str) -> Self {
        let mut mpirun = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
        let said = BufReader::new(mpirun.stderr.take().expect("piped"));
        let mut running = Running { mpirun, said, text: String::new() };
        running.wait_for(until);
        running
    }

    /// Reads what is said until this text is in it.
    fn wait_for(&mut self, text: &str) {
        while !self.text.contains(text) {
            assert!(self.said.read_line(&mut self.text).expect("text") > 0, "{}", self.text);
        }
    }

    /// The process of a rank.
    fn rank(&self, rank: usize) -> u32 {
        self.ranks().into_iter().find(|(number, _)| *number == rank).expect("the rank").1
    }

    /// The ranks of this mpirun that live, and their processes.
    fn ranks(&self) -> Vec<(usize, u32)> {
        let all = std::fs::read_dir("/proc").expect("/proc").flatten();
        let numbers = all.filter_map(|entry| entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
        let parent = self.mpirun.id().to_string();
        let rank = |process: u32| {
            let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
            let environment = std::fs::read(format!("/proc/{process}/environ")).ok()?;
            let of_mpirun = stat.rsplit(')').next()?.split_whitespace().nth(1) == Some(&parent[..]);
            let variable =
                environment.split(|&byte| byte == 0).find_map(|v| v.strip_prefix(b"OMPI_COMM_WORLD_RANK="))?;
            let rank = std::str::from_utf8(variable).ok()?.parse().ok()?;
            of_mpirun.then_some((rank, process))
        };
        numbers.filter_map(rank).collect()
    }

    /// Waits for the end; returns mpirun's exit status and all that was said.
    fn ended(mut self) -> (Option<i32>, String) {
        let start = Instant::now();
        self.said.read_to_string(&mut self.text).expect("text");
        let status = self.mpirun.wait().expect("it ends").code();
        assert!(start.elapsed() < BOUND, "took {:?}: {}", start.elapsed(), self.text);
        (status, self.text)
    }
}

fn signal(process: u32, signal: &str) {
    assert!(Command::new("kill").args([signal, &process.to_string()]).status().expect("kill").success());
}

fn slow(more: &[&str]) -> Running {
    Running::start(mpirun(2, &[&TRAIN[..], &SLOW, more].concat()), "epoch 1/")
}

#[test]
fn a_killed_rank_ends_all() {
    let run = slow(&[]);
    signal(run.rank(1), "-KILL");
    let (status, said) = run.ended();
    // mpirun sees it first, and kills the others.
    assert_eq!(status, Some(137), "{said}");
    assert!(said.contains("process rank 1") && said.contains("exited on signal 9"), "{said}");
}

/// SIGSTOP: the process is there, and says nothing. mpirun alone would wait for ever.
#[test]
fn a_stopped_rank_is_named_and_ends_all() {
    let run = slow(&["--peer-timeout", "5"]);
    signal(run.rank(1), "-STOP");
    let (status, said) = run.ended();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("error: lost the connection to w1: nothing arrived for 5.0 s"), "{said}");
}

/// As a scheduler ends a job whose rank has died. Such a job once said nothing until the scheduler killed it.
#[test]
fn a_run_that_is_to_stop_does_not_wait_for_a_rank_that_does_not_answer() {
    let folder = folder("stopping");
    let saved = folder.join("saved");
    let run = slow(&["--checkpoint", saved.to_str().expect("UTF-8"), "--checkpoint-every", "1"]);
    let start = Instant::now();
    signal(run.rank(1), "-STOP");
    signal(run.rank(0), "-TERM");
    let (status, said) = run.ended();
    assert_eq!(status, Some(143), "{said}");
    assert!(said.contains("SIGTERM: ended at once, because w1 does not answer"), "{said}");
    assert!(said.contains("to resume from the newest checkpoint: distgpipe train "), "{said}");
    // The limit after which the connection counts as broken is 20 s.
    assert!(start.elapsed() < Duration::from_secs(15), "took {:?}", start.elapsed());
    // The signal may come long after the rank has fallen silent.
    let mut run = slow(&["--peer-timeout", "60"]);
    signal(run.rank(1), "-STOP");
    run.wait_for("nothing has arrived from w1");
    let start = Instant::now();
    signal(run.rank(0), "-TERM");
    let (status, said) = run.ended();
    assert_eq!(status, Some(143), "{said}");
    assert!(said.contains("SIGTERM: ended at once, because w1 does not answer"), "{said}");
    assert!(start.elapsed() < Duration::from_secs(15), "took {:?}", start.elapsed());
}

/// Rank 0 cannot say why, so another rank does.
#[test]
fn a_stopped_driver_is_named_and_ends_all() {
    let run = slow(&["--peer-timeout", "5"]);
    signal(run.rank(0), "-STOP");
    let (status, said) = run.ended();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("rank 1: error: lost the connection to w0: nothing arrived for 5.0 s"), "{said}");
}

/// The rank that is left has another failure to tell rank 0 of, and then waits for what rank 0 says. Under Slurm, such ranks once
/// outlived their job.
#[test]
fn a_rank_does_not_wait_for_ever_for_a_driver_that_has_stopped() {
    let three = ["train", "--partitions", "3", "--device", "cpu", "--threads", "1", "--peer-timeout", "5"];
    let run = Running::start(mpirun(3, &[&three[..], &SLOW].concat()), "epoch 1/");
    signal(run.rank(1), "-STOP");
    std::thread::sleep(Duration::from_secs(1));
    signal(run.rank(0), "-STOP");
    let (status, said) = run.ended();
    assert_eq!(status, Some(1), "{said}");
    let expected = ["hearing of rank 0 took longer than 5.0 s", "lost the connection to w0"];
    assert!(said.contains("rank 2: error: ") && expected.iter().any(|text| said.contains(text)), "{said}");
}

/// What `sbatch --requeue` does: the same command is started again.
#[test]
fn a_killed_run_that_is_started_again_goes_on_with_the_losses_of_one_that_was_not() {
    let folder = folder("requeued");
    let (saved, log, whole) = (folder.join("saved"), folder.join("log"), folder.join("whole"));
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let (saved_text, log_text, whole_text) = (text(&saved), text(&log), text(&whole));
    let run = ["--epochs", "4", "--no-evaluate", "--checkpoint-every", "3"];
    let command = |slow: &[&str]| {
        let place = ["--checkpoint", &saved_text, "--resume=if-any", "--log", &log_text];
        mpirun(2, &[&TRAIN[..], &run, &place, slow].concat())
    };
    let first = Running::start(command(&["--faults", "w0>w1:delay=20@0"]), "epoch 1/4");
    let ranks = first.ranks();
    signal(first.mpirun.id(), "-KILL");
    drop(first.ended());
    let patience = Instant::now();
    while ranks.iter().any(|(_, process)| Path::new(&format!("/proc/{process}/fd")).exists()) {
        assert!(patience.elapsed() < BOUND, "ranks outlive mpirun");
        std::thread::sleep(Duration::from_millis(20));
    }
    let before = losses(&log).len();
    assert!((1..80).contains(&before), "it was killed after {before} steps");
    let (status, said) = ended(command(&[]));
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("resuming after step "), "{said}");
    let (status, said) = ended(mpirun(2, &[&TRAIN[..], &run[..3], &["--log", &whole_text]].concat()));
    assert_eq!(status, Some(0), "{said}");
    assert_eq!(losses(&log), losses(&whole));
}
