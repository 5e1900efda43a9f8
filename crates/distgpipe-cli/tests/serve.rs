//! `distgpipe serve`, `join` and `train --server`: what crosses the network, and who may use a server. `serve_attacks.rs` has what
//! a server survives.

mod archives;
mod command;
mod serving;

use archives::exported;
use command::refused;
use serving::{capture, losses, path, Serve, LIMIT, TRAIN};
use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// All bytes of all files under a directory.
fn contents(folder: &Path) -> Vec<u8> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a directory").flatten() {
        match entry.path() {
            path if path.is_dir() => all.extend(contents(&path)),
            path => all.extend(std::fs::read(path).expect("a file")),
        }
    }
    all
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// Standard output that is not a terminal may be a journal.
#[test]
fn the_join_string_is_printed_on_a_terminal_or_on_request_and_nowhere_else() {
    let mut server = Serve::start("serve-journal", &[]);
    server.wait_for("`distgpipe serve --join-string` prints the join string");
    assert_eq!(server.secret().len(), 64);
    let _ = server.child.kill();
    assert_eq!(server.printed.recv_timeout(LIMIT).expect("it ends"), "");
    while let Ok(line) = server.lines.recv_timeout(LIMIT) {
        server.seen.push(line);
    }
    assert!(!server.seen.iter().any(|line| line.contains(server.secret())), "{:#?}", server.seen);
}

/// On a terminal, the join string is one line, which a user can copy.
#[test]
fn the_join_string_is_printed_once_on_a_terminal() {
    let (keyboard, terminal) = terminal();
    let folder = command::directory("serve-on-a-terminal");
    let mut serve = command::distgpipe(&["serve", "--listen", "127.0.0.1:0", "--device", "cpu", "--identity"]);
    let mut child = serve.arg(folder.join("identity")).stdout(terminal).spawn().expect("it was built");
    // The command holds a handle on the terminal.
    drop(serve);
    let mut shown = BufReader::new(keyboard).lines().map_while(Result::ok);
    let mut line = || shown.next().expect("it prints").trim_end().to_owned();
    let address = line().strip_prefix("listening ").expect("an address").to_owned();
    let join_string: distgpipe::JoinString = line().parse().expect("a join string");
    assert_eq!(join_string.addresses, [address]);
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    assert_eq!(shown.collect::<Vec<String>>(), Vec::<String>::new());
}

#[test]
fn a_server_without_tls_warns_and_listens_on_this_host_alone() {
    let mut server = Serve::start("serve-insecure", &["--insecure"]);
    server.wait_for("warning: --insecure: nothing is encrypted");
    for listen in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"] {
        let said = refused(2, &["serve", "--insecure", "--listen", listen]);
        assert!(said.contains("--insecure: expected --listen with a loopback address"), "{said}");
    }
}

/// Without TLS the key of a run is the server's secret, which another server must not learn.
#[test]
fn a_server_without_tls_connects_to_no_other_server() {
    let said = refused(2, &["serve", "--insecure", "--listen", "127.0.0.1:0", "--allow", "gpu-2:7443"]);
    assert!(said.contains("--insecure: expected no --allow"), "{said}");
}

/// What the owner's limits and the separation of processes come to, as the system sees it.
#[test]
fn the_process_of_a_job_writes_no_files_and_has_neither_the_key_nor_the_secret() {
    use distgpipe::prelude::*;
    let mut server = Serve::start("serve-process", &["--memory", "2GiB"]);
    let servers = vec![server.join_string.parse().expect("a join string")];
    let pipeline = Pipeline::builder(Mlp::default().model().expect("a model"))
        .balance([1, 2, 1])
        .place("client,server,client")
        .device(Device::Cpu)
        .threads(1)
        .workers(Workers::Servers { servers, labels_leave: false, listen: None })
        .build()
        .expect("it starts");
    let line = server.wait_for(": process ");
    let process = line.rsplit(' ').next().expect("a number").to_owned();
    let of = |what: &str| std::fs::read(format!("/proc/{process}/{what}")).expect("it runs");
    let limits = String::from_utf8_lossy(&of("limits")).into_owned();
    // CUDA reserves more addresses than any host has memory, so they have no limit.
    for (limit, expected) in [
        ("Max file size", "0"),
        ("Max core file size", "0"),
        ("Max data size", "2147483648"),
        ("Max open files", "256"),
        ("Max address space", "unlimited"),
    ] {
        let line = limits.lines().find(|line| line.starts_with(limit)).expect("a limit");
        let words: Vec<&str> = line[limit.len()..].split_whitespace().collect();
        assert_eq!(words[..2], [expected, expected], "{line}");
    }
    let identity = server.folder.join("identity");
    let text = std::fs::read_to_string(&identity).expect("the identity");
    let key = text.lines().next().and_then(|line| line.strip_prefix("key ")).expect("a key");
    for place in ["environ", "cmdline"] {
        assert!(!contains(&of(place), server.secret()) && !contains(&of(place), key), "{place}");
    }
    for open in std::fs::read_dir(format!("/proc/{process}/fd")).expect("it runs").flatten() {
        assert_ne!(std::fs::read_link(open.path()).ok(), Some(identity.clone()));
    }
    drop(pipeline);
}

/// A measurement is a job of its own: its process has the limits of jobs, and it takes the place of one.
#[test]
fn a_client_measures_its_link_and_a_server_in_a_run_is_busy() {
    use distgpipe::prelude::*;
    let mut server = Serve::start("serve-bandwidth", &["--threads", "1"]);
    let measure = ["bandwidth", "--server", "box", "--sizes", "4KiB", "--seconds", "0.01", "--json"];
    let measured = server.client(&measure, None);
    assert!(measured.status.success(), "{}", String::from_utf8_lossy(&measured.stderr));
    let result: serde_json::Value = serde_json::from_slice(&measured.stdout).expect("JSON");
    let link = &result["links"][0];
    assert_eq!((link["name"].as_str(), link["transport"].as_str()), (Some("box"), Some("tls")));
    assert_eq!(link["measurements"].as_array().map(Vec::len), Some(4));
    server.wait_for_ends(1);
    let threads = server.client(&[&measure[..], &["--threads", "2"]].concat(), None);
    let said = String::from_utf8_lossy(&threads.stderr);
    assert!(threads.status.code() == Some(1) && said.contains("this server gives a job at most 1, got 2"), "{said}");
    server.wait_for_ends(2);
    let servers = vec![server.join_string.parse().expect("a join string")];
    let run = Pipeline::builder(Mlp::default().model().expect("a model")).place("client,server,client");
    let workers = Workers::Servers { servers, labels_leave: false, listen: None };
    let run = run.device(Device::Cpu).threads(1).workers(workers).build().expect("it starts");
    let busy = server.client(&measure, None);
    let said = String::from_utf8_lossy(&busy.stderr);
    assert!(busy.status.code() == Some(3) && said.contains("busy"), "{said}");
    drop(run);
}

#[test]
fn split_learning_over_a_server_equals_threads_and_the_secret_stays_where_it_is() {
    let mut server = Serve::start("serve-train", &[]);
    let log = server.folder.join("threads");
    let threads = server.client(&[&TRAIN[..], &["--log", path(&log)]].concat(), None);
    assert!(threads.status.success(), "{}", String::from_utf8_lossy(&threads.stderr));
    let saved = server.folder.join("saved");
    let more = ["--trace", "--checkpoint", path(&saved)];
    assert_eq!(server.train("first", &more), losses(&log));
    server.wait_for("ended after");
    // The next job is accepted at once.
    assert_eq!(server.train("second", &[]), losses(&log));
    // What the client wrote: logs, traces, configurations, checkpoints. The key of the server is not secret.
    let secret = server.secret().to_owned();
    assert_eq!(secret.len(), 64);
    for folder in ["first", "second", "saved"] {
        assert!(!contains(&contents(&server.folder.join(folder)), &secret), "{folder}");
    }
    assert!(!server.seen.iter().any(|line| line.contains(&secret)));
    // What the client keeps is there, and it alone can read it.
    let kept = server.folder.join("config/distgpipe/servers/box");
    assert!(contains(&std::fs::read(&kept).expect("kept"), &secret));
    let mode = |path: &Path| std::fs::metadata(path).expect("it exists").permissions().mode() & 0o777;
    assert_eq!((mode(&kept), mode(kept.parent().expect("a folder"))), (0o600, 0o700));
    let listed = server.client(&["join", "--list"], None);
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.contains(&format!("box  {}", server.address)) && !listed.contains(&secret), "{listed}");
    assert!(server.client(&["join", "box", "--remove"], None).status.success());
    let unknown = server.client(&[&TRAIN[..], &["--server", "box"]].concat(), None);
    assert_eq!(unknown.status.code(), Some(2));
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(said.contains("`distgpipe join box`"), "{said}");
}

#[test]
fn labels_leave_the_client_only_if_the_user_says_so() {
    let server = Serve::start("serve-labels", &[]);
    let two: Vec<&str> = TRAIN.iter().map(|&a| if a == "client,server,client" { "client,server" } else { a }).collect();
    let two: Vec<&str> = two.into_iter().map(|a| if a == "1,2,1" { "2,2" } else { a }).collect();
    let refused = server.client(&[&two[..], &["--server", "box"]].concat(), None);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && said.contains("labels would leave") && said.contains("--labels-leave"),
        "{said}"
    );
    let allowed = server.client(&[&two[..], &["--server", "box", "--labels-leave"]].concat(), None);
    assert!(allowed.status.success(), "{}", String::from_utf8_lossy(&allowed.stderr));
}

/// A terminal of this test, and what it shows.
fn terminal() -> (std::fs::File, std::fs::File) {
    use rustix::pty::{grantpt, openpt, ptsname, unlockpt, OpenptFlags};
    let keyboard = std::fs::File::from(openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal"));
    grantpt(&keyboard).and_then(|()| unlockpt(&keyboard)).expect("it is this test's");
    let name = ptsname(&keyboard, Vec::new()).expect("a name").into_string().expect("text");
    let terminal = std::fs::OpenOptions::new().read(true).write(true).open(name).expect("it is there");
    (keyboard, terminal)
}

/// The terminal once showed the secret. It is as before afterwards, also when the command is interrupted.
#[test]
fn a_join_string_that_is_pasted_into_a_terminal_is_not_shown() {
    use rustix::termios::{tcgetattr, LocalModes};
    let server = Serve::start("serve-terminal", &[]);
    let (mut keyboard, terminal) = terminal();
    let before = tcgetattr(&terminal).expect("a terminal");
    assert!(before.local_modes.contains(LocalModes::ECHO));
    for interrupted in [true, false] {
        let mut command = server.command(&["join", "pasted"]);
        let mut child = command.stdin(terminal.try_clone().expect("a handle")).spawn().expect("it was built");
        let mut said = BufReader::new(child.stderr.take().expect("piped"));
        let mut prompt = String::new();
        said.read_line(&mut prompt).expect("text");
        assert!(prompt.contains("which is not shown"), "{prompt}");
        if interrupted {
            let process = child.id().to_string();
            assert!(Command::new("kill").args(["-INT", &process]).status().expect("kill").success());
        } else {
            writeln!(keyboard, "{}", server.join_string).expect("it reads");
        }
        assert_eq!(child.wait().expect("it ends").success(), !interrupted);
        assert_eq!(tcgetattr(&terminal).expect("a terminal").local_modes, before.local_modes);
    }
    writeln!(keyboard, "end").expect("it is open");
    let mut shown = Vec::new();
    while !shown.ends_with(b"end\r\n") {
        let mut byte = [0];
        keyboard.read_exact(&mut byte).expect("it is open");
        shown.extend(byte);
    }
    assert_eq!(String::from_utf8_lossy(&shown), "\r\nend\r\n");
    assert!(server.client(&["join", "--list"], None).stdout.starts_with(b"box  "));
    assert_eq!(server.client(&["join", "--list"], None).stdout.iter().filter(|&&byte| byte == b'\n').count(), 2);
}

/// The environment and a file hold join strings too; the command line does not.
#[test]
fn join_strings_come_from_a_file_or_the_environment_and_wrong_ones_are_not_repeated() {
    let server = Serve::start("serve-environment", &[]);
    let file = server.folder.join("join.txt");
    std::fs::write(&file, format!("{}\n", server.join_string)).expect("a file");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).expect("it is this test's");
    let from_file = server.client(&[&TRAIN[..], &["--server-file", path(&file)]].concat(), None);
    let said = String::from_utf8_lossy(&from_file.stderr).into_owned();
    assert!(from_file.status.success(), "{said}");
    assert!(said.contains("its mode 644 gives other users access to a secret: run chmod 600"), "{said}");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("it is this test's");
    let private = server.client(&[&TRAIN[..], &["--server-file", path(&file)]].concat(), None);
    assert!(!String::from_utf8_lossy(&private.stderr).contains("chmod"), "{private:?}");
    let output = server.command(&TRAIN).env("DISTGPIPE_SERVER", &server.join_string).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("client → server"));
    let damaged = server.join_string.replacen(":1:", ":1:0", 1);
    std::fs::write(&file, &damaged).expect("a file");
    let said = refused(2, &[&TRAIN[..], &["--server-file", path(&file)]].concat());
    assert!(said.contains("damaged") && !said.contains(server.secret()), "{said}");
    // Errors once repeated it where it does not belong.
    for wrong in
        [&["join", "box", &server.join_string][..], &["join", &server.join_string], &["train", "--server", &damaged]]
    {
        let said = refused(2, wrong);
        assert!(said.contains("a join string is secret") && !said.contains(server.secret()), "{said}");
    }
}

/// Another key and another secret are told apart.
#[test]
fn a_client_hears_whether_the_key_or_the_secret_is_wrong() {
    let server = Serve::start("serve-wrong", &[]);
    let other = Serve::start("serve-wrong-other", &[]);
    let at = |join_string: &str, key: &str, secret: &str| {
        let parsed: distgpipe::JoinString = join_string.parse().expect("a join string");
        let server = distgpipe::JoinString {
            key: key.parse().expect("a key"),
            secret: secret.parse().expect("a secret"),
            ..parsed
        };
        server.to_text()
    };
    let field = |server: &Serve, n: usize| server.join_string.split(':').nth(n).expect("a field").to_owned();
    let (key, secret) = (field(&server, 2), field(&server, 3));
    for (wrong, expected) in [
        (at(&server.join_string, &field(&other, 2), &secret), "another key than the join string says"),
        (at(&server.join_string, &key, &field(&other, 3)), "does not know the server's secret"),
    ] {
        let output = server.command(&TRAIN).env("DISTGPIPE_SERVER", wrong).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains(expected), "{said}");
    }
}

/// A run over a server that has begun, or why it has not.
fn join(server: &Serve) -> Result<distgpipe::Pipeline, String> {
    use distgpipe::prelude::*;
    let servers = vec![server.join_string.parse().expect("a join string")];
    let run = Pipeline::builder(Mlp::default().model().expect("a model")).balance([1, 2, 1]);
    let workers = Workers::Servers { servers, labels_leave: false, listen: None };
    let run = run.place("client,server,client").micro_batches(2).device(Device::Cpu).threads(1).workers(workers);
    run.build().map_err(|error| error.to_string())
}

/// The loss of a step of training.
fn step(pipeline: &mut distgpipe::Pipeline) -> f64 {
    use distgpipe::tch::{Device, Kind, Tensor};
    let x = Tensor::ones([16, 1, 8, 8], (Kind::Float, Device::Cpu));
    let batch = distgpipe::Batch::new(x, Tensor::zeros([16], (Kind::Int64, Device::Cpu)));
    pipeline.train_step(&batch).expect("a step").loss
}

/// What the server says about its jobs: their number at a time, and the gigabytes of each.
fn announced_memory(server: &mut Serve) -> f64 {
    let line = server.wait_for("memory each");
    let gigabytes = line.split(", ").nth(1).and_then(|rest| rest.split(" GB").next());
    gigabytes.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{line}"))
}

#[test]
fn jobs_share_the_memory_of_a_server_and_run_at_the_same_time() {
    let mut alone = Serve::start("serve-one-job", &[]);
    let mut many = Serve::start("serve-many-jobs", &["--jobs", "16"]);
    // Other tests use memory as well.
    let (whole, part) = (announced_memory(&mut alone), announced_memory(&mut many));
    assert!((8.0..32.0).contains(&(whole / part)), "{whole} GB alone, {part} GB each of 16");
    let mut server = Serve::start("serve-two-jobs", &["--jobs", "2"]);
    let each = announced_memory(&mut server);
    let mut both = [0, 1].map(|_| join(&server).expect("there are two places"));
    for job in [0, 1] {
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.process_of_run(job))).expect("it runs");
        let line = limits.lines().find(|line| line.starts_with("Max data size")).expect("a limit");
        let bytes: f64 = line.split_whitespace().nth(3).and_then(|word| word.parse().ok()).expect("a number");
        assert!((bytes / 1e9 - each).abs() < 0.051, "{line}, and {each} GB announced");
    }
    let losses = [0, 1, 0, 1].map(|job| step(&mut both[job]));
    assert_eq!((losses[0], losses[2]), (losses[1], losses[3]));
    let refused = join(&server).err().expect("there is no third place");
    assert!(refused.contains("busy with another run since") && refused.contains(", and with another run"), "{refused}");
    let [first, mut second] = both;
    drop(first);
    server.wait_for_ends(1);
    let mut third = join(&server).expect("there is a place again");
    assert!(step(&mut third).is_finite() && step(&mut second).is_finite());
}

/// The answer comes within a second, of which the server waits half for the last run to end. The best of a few, because other tests
/// use the machine as well.
#[test]
fn a_client_hears_within_a_second_that_the_server_is_busy() {
    let server = Serve::start("serve-busy-answer", &[]);
    let mut first = join(&server).expect("it is free");
    let answers = [0, 1, 2, 3, 4].map(|_| {
        let start = Instant::now();
        let refused = join(&server).err().expect("it is busy");
        assert!(refused.contains("busy with another run since 20"), "{refused}");
        start.elapsed()
    });
    assert!(answers.iter().any(|answer| *answer < Duration::from_secs(1)), "{answers:?}");
    assert!(step(&mut first).is_finite());
}

#[test]
fn a_second_client_hears_at_once_that_the_server_is_busy_and_a_killed_client_frees_its_place() {
    let mut server = Serve::start("serve-busy", &[]);
    let long: Vec<&str> = TRAIN.iter().map(|&a| if a == "4" { "1000000" } else { a }).collect();
    let long = [&long[..], &["--epochs", "1000000", "--server", "box"]].concat();
    let mut first = server.command(&long).spawn().expect("it runs");
    server.wait_for("partition 1 of 3");
    let start = Instant::now();
    let second = server.client(&[&TRAIN[..], &["--server", "box"]].concat(), None);
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(3), "{said}");
    assert!(said.contains("busy with another run since 20"), "{said}");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    first.kill().expect("it runs");
    first.wait().expect("it ends");
    // The server waits for a lost client for a moment, and the next client with it.
    assert_eq!(server.train("next", &[]).len(), 4);
}

/// A suspended client is silent, as one behind a network that is down: nobody may take its place while it may come back.
#[test]
fn a_client_that_is_silent_for_longer_than_the_limit_keeps_its_place_and_loses_nothing() {
    let mut server = Serve::start("serve-silent", &["--peer-timeout", "1"]);
    let long: Vec<&str> = TRAIN.iter().map(|&a| if a == "4" { "1500" } else { a }).collect();
    let train = |server: &Serve, name: &str| {
        let log = server.folder.join(name);
        let run = [&long[..], &["--epochs", "1000", "--server", "box", "--log", path(&log)]].concat();
        (server.command(&run).spawn().expect("it runs"), log)
    };
    let ended = |(run, log): (Child, PathBuf)| {
        let output = run.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        losses(&log)
    };
    let quiet = train(&server, "quiet");
    let expected = ended(quiet);
    server.wait_for_ends(1);
    let silent = train(&server, "silent");
    server.wait_for_lines("partition 1 of 3", 2);
    let signal = |signal: &str| {
        let process = silent.0.id().to_string();
        assert!(Command::new("kill").args([signal, &process]).status().expect("kill").success());
    };
    signal("-STOP");
    // The job's process gives the connection up after 1 s, the relay 5 s later, and a run that gives way does so after 2 s more.
    std::thread::sleep(Duration::from_secs(9));
    let other = server.client(&[&TRAIN[..], &["--server", "box"]].concat(), None);
    signal("-CONT");
    assert_eq!(other.status.code(), Some(3), "{}", String::from_utf8_lossy(&other.stderr));
    assert_eq!(ended(silent), expected);
}

/// Until the run had begun, notices named the worker, whose name says nothing of where it is.
#[test]
fn a_server_that_does_not_answer_is_named_as_the_user_has_joined_it() {
    let server = Serve::start("serve-mute", &[]);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut mute: distgpipe::JoinString = server.join_string.parse().expect("a join string");
    mute.addresses = vec![listener.local_addr().expect("an address").to_string()];
    assert!(server.client(&["join", "mute"], Some(&mute.to_text())).status.success());
    let run = [&TRAIN[..], &["--server", "mute", "--peer-timeout", "2"]].concat();
    let said = String::from_utf8_lossy(&server.client(&run, None).stderr).into_owned();
    assert!(said.contains("mute was asked to join the run 0.5 s ago and has not answered"), "{said}");
    let replicas = ["--replicas", "2", "--server", "box", "--server", "mute", "--server", "mute-2"];
    mute.addresses.push("127.0.0.1:1".to_owned());
    assert!(server.client(&["join", "mute-2"], Some(&mute.to_text())).status.success());
    let run = [&TRAIN[..], &replicas, &["--labels-leave", "--peer-timeout", "2"]].concat();
    let said = String::from_utf8_lossy(&server.client(&run, None).stderr).into_owned();
    assert!(said.contains("mute was asked to join the run 0.5 s ago"), "{said}");
}

/// A client that came within milliseconds of the last one's end once heard that the server was busy.
#[test]
fn a_client_that_comes_when_the_last_one_has_just_ended_is_accepted() {
    let server = Serve::start("serve-next", &[]);
    let over = || losses_over(&[(&server.join_string, &server.address)], "client,server,client", vec![1, 2, 1], None);
    let first = over();
    for _ in 0..8 {
        assert_eq!(over(), first);
    }
}

/// The same losses as without a server, with and without a codec, which rounds alike on both ends.
#[test]
fn a_server_trains_a_model_from_pytorch_like_threads() {
    let server = Serve::start("serve-exported", &[]);
    let [model, _] = exported(&server.folder);
    let run = ["train", "--model", &model, "--cut", "first=2,last=1", "--limit", "64", "--batch", "16", "--seed", "1"];
    let run = [&run[..], &["--chunks", "2", "--steps", "4", "--no-evaluate"]].concat();
    let losses_of = |name: &str, more: &[&str]| {
        let log = server.folder.join(name);
        let output = server.client(&[&run[..], &["--log", path(&log)], more].concat(), None);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        losses(&log)
    };
    let place = ["--place", "client,server,client"];
    let threads = losses_of("threads", &place);
    assert_eq!(threads.len(), 4);
    assert_eq!(losses_of("server", &["--server", "box"]), threads);
    let tiles = losses_of("server-tiles", &["--server", "box", "--codec", "tile:4"]);
    assert_ne!(tiles, threads, "the codec rounds");
    assert_eq!(
        losses_of("processes-tiles", &[&place[..], &["--workers", "processes", "--codec", "tile:4"]].concat()),
        tiles
    );
}

#[test]
fn the_owner_of_a_server_chooses_the_models_and_operators_that_it_runs() {
    let run = [
        "--cut",
        "first=2,last=1",
        "--steps",
        "2",
        "--limit",
        "32",
        "--batch",
        "16",
        "--no-evaluate",
        "--device",
        "cpu",
    ];
    let train = |server: &Serve, model: &str, more: &[&str]| {
        let flags = [&["train", "--model", model], &run[..], &["--chunks", "2", "--server", "box"], more].concat();
        let output = server.client(&flags, None);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let both = Serve::start("serve-models-both", &["--models", "builtin,exported"]);
    let [plain, sinc] = exported(&both.folder);
    assert_eq!(train(&both, &plain, &[]).0, Some(0));
    let (_, client) = train(&both, &sinc, &[]);
    assert!(client.contains("`aten.sinc.default` in `"), "the client's own list: {client}");
    let (status, said) = train(&both, &sinc, &["--allow-op", "aten.sinc.default"]);
    assert!(status == Some(1) && said.contains("this machine does not allow: aten.sinc.default"), "{said}");
    assert!(said.contains("--allow-op"), "{said}");
    drop(both);
    let open = Serve::start("serve-models-exported", &["--models", "exported", "--allow-op", "sinc.default"]);
    let (status, said) = train(&open, &sinc, &["--allow-op", "sinc.default"]);
    assert_eq!(status, Some(0), "{said}");
    let (status, said) = train(&open, "mobilenet_v2", &["--data", "synthetic", "--set", "image=32"]);
    assert!(status == Some(1) && said.contains("this server runs exported models only"), "{said}");
    drop(open);
    let closed = Serve::start("serve-models-builtin", &["--models", "builtin"]);
    let (status, said) = train(&closed, &plain, &[]);
    assert!(status == Some(1) && said.contains("this server runs built-in models only"), "{said}");
    for (name, said) in [
        ("from_file.default", "its argument `filename` is neither a tensor nor a number"),
        ("aten.no_such.default", "no_such"),
        ("nonsense", "expected an operator of aten and its overload"),
        ("atleast_1d.default", "it is made of other operators, and may return a view"),
        ("_sparse_coo_tensor_unsafe.default", "it "),
        ("torchvision::nms.default", "expected an operator of aten and its overload"),
    ] {
        let refusal = refused(2, &["serve", "--allow-op", name]);
        assert!(refusal.contains("--allow-op: ") && refusal.contains(said), "{name}: {refusal}");
    }
}

/// Behind a router that lets nothing in, the server connects, and the roles are unchanged.
#[test]
fn a_server_that_cannot_be_reached_connects_to_the_client() {
    // A port that nobody has: the client listens there later.
    let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").to_string();
    let server = Serve::start("serve-dial", &["--dial", &port]);
    let (direct, dialed) = (server.train("direct", &[]), server.train("dialed", &["--listen", &port]));
    assert_eq!(direct, dialed);
    // The next run is connected too.
    assert_eq!(server.train("again", &["--listen", &port]), direct);
}

/// The measurement crosses TLS, whichever end connects, and starts no process for a job.
#[test]
fn auto_measures_the_link_to_a_server() {
    let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").to_string();
    let mut server = Serve::start("serve-auto", &["--dial", &port]);
    for more in [&[][..], &["--listen", &port]] {
        let arguments = [&TRAIN[..], &["--server", "box", "--codec", "auto"], more].concat();
        let output = server.client(&arguments, None);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(
            said.lines().any(|line| line.contains("--codec auto: ") && line.contains("/s back, round trip")),
            "{said}"
        );
        server.wait_for("has measured the link");
        server.wait_for("ended after");
        let started = server.seen.drain(..).filter(|line| line.contains(": process ")).count();
        assert_eq!(started, 1);
    }
}

/// Two servers know nothing of each other's secrets, and connect only where their owners allow it.
#[test]
fn a_pipeline_over_two_servers_equals_threads_and_needs_the_owners_permission() {
    let second = Serve::start("serve-two-b", &[]);
    let mut first = Serve::start("serve-two-a", &["--allow", &second.address]);
    let joined = first.client(&["join", "box-2"], Some(&second.join_string));
    assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
    let three: Vec<&str> = TRAIN
        .iter()
        .map(|&a| match a {
            "client,server,client" => "client,one,two,client",
            "1,2,1" => "1,1,1,1",
            other => other,
        })
        .collect();
    let log = |name: &str| first.folder.join(name);
    let (threads, servers) = (log("threads"), log("servers"));
    for (log, flags) in [(&threads, &[][..]), (&servers, &["--server", "box", "--server", "box-2"])] {
        let output = first.client(&[&three[..], &["--log", path(log)], flags].concat(), None);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(losses(&servers), losses(&threads));
    // The other way round, the first of the two dials, and its owner has allowed nothing.
    let output = first.client(&[&three[..], &["--server", "box-2", "--server", "box"]].concat(), None);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("has not allowed it to connect to"), "{said}");
    first.wait_for("ended after");
}

/// Passes connections on to an address, and cuts them: the first after the first of these numbers of bytes, in both directions
/// together, the next one after the next. When none are left, connections last.
fn cutting_relay(to: String, cuts: &[usize]) -> (String, Arc<Mutex<VecDeque<usize>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let left = Arc::new(Mutex::new(VecDeque::from(cuts.to_vec())));
    let cuts = left.clone();
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            // Nobody listens: so it is for whoever has connected.
            let Ok(far) = TcpStream::connect(&to) else { continue };
            let passed = Arc::new(AtomicUsize::new(0));
            for (from, into) in [(&near, &far), (&far, &near)] {
                let (mut from, mut into) = (from.try_clone().expect("a handle"), into.try_clone().expect("a handle"));
                let (cuts, passed) = (cuts.clone(), passed.clone());
                std::thread::spawn(move || {
                    let mut buffer = [0; 512];
                    while let Ok(read @ 1..) = from.read(&mut buffer) {
                        let total = passed.fetch_add(read, Ordering::SeqCst) + read;
                        let mut cuts = cuts.lock().expect("not poisoned");
                        if cuts.front().is_some_and(|&cut| total >= cut) {
                            cuts.pop_front();
                            break;
                        }
                        drop(cuts);
                        if into.write_all(&buffer[..read]).is_err() {
                            break;
                        }
                    }
                    let _ = from.shutdown(Shutdown::Both);
                    let _ = into.shutdown(Shutdown::Both);
                });
            }
        }
    });
    (address, left)
}

/// Losses of a few steps, bit for bit, in split learning over these servers.
fn losses_over(servers: &[(&str, &str)], place: &str, balance: Vec<usize>, listen: Option<String>) -> Vec<u64> {
    use distgpipe::Workers;
    let servers = servers.iter().map(|(join_string, address)| {
        let parsed: distgpipe::JoinString = join_string.parse().expect("a join string");
        distgpipe::JoinString { addresses: vec![(*address).to_owned()], ..parsed }
    });
    let workers = Workers::Servers { servers: servers.collect(), labels_leave: false, listen };
    losses_of(workers, 32, |builder| builder.balance(balance).place(place).micro_batches(4))
}

/// Losses of a few steps on batches of this many rows, bit for bit.
fn losses_of(
    workers: distgpipe::Workers,
    rows: i64,
    build: impl FnOnce(distgpipe::Builder) -> distgpipe::Builder,
) -> Vec<u64> {
    use distgpipe::prelude::*;
    use distgpipe::tch::{Device as TorchDevice, Kind, Tensor};
    let builder = Pipeline::builder(Mlp::default().model().expect("a model")).device(Device::Cpu).threads(1);
    let mut pipeline = build(builder).workers(workers).build().unwrap_or_else(|failure| panic!("{failure}"));
    let x = (Tensor::arange(rows * 64, (Kind::Float, TorchDevice::Cpu)).view([rows, 1, 8, 8]) * 0.37).sin();
    let y = Tensor::arange(rows, (Kind::Int64, TorchDevice::Cpu)).remainder(10);
    let step = |_| {
        let report = pipeline.train_step(&Batch::new(x.shallow_clone(), y.shallow_clone()));
        report.unwrap_or_else(|error| panic!("{error}")).loss.to_bits()
    };
    (0..8).map(step).collect()
}

/// Two replicas of two workers, on this process and three servers, with batches that do not divide evenly: gradients go from
/// replica to replica over TLS, raw and through a codec that remembers, and the statistics of batch norms from the first to the other.
#[test]
fn replicas_of_a_pipeline_over_servers_train_as_threads_do() {
    let mut third = Serve::start("serve-replicas-third", &[]);
    let mut second = Serve::start("serve-replicas-second", &["--allow", &third.address]);
    let mut first = Serve::start("serve-replicas-first", &["--allow", &third.address]);
    for (number, codec) in ["raw", "feedback(tile:4)"].into_iter().enumerate() {
        let codecs = distgpipe::CodecPolicy { replicas: codec.parse().expect("a codec"), ..Default::default() };
        let train = |workers| {
            losses_of(workers, 29, |builder| {
                builder.balance([2, 2]).place("client,server").micro_batches(3).replicas(2).codecs(codecs.clone())
            })
        };
        assert_eq!(train(over([&first, &second, &third])), train(distgpipe::Workers::Threads), "{codec}");
        // The place of a run is free when its process has ended.
        [&mut first, &mut second, &mut third].into_iter().for_each(|server| server.wait_for_ends(number + 1));
    }
    let (servers, threads) = (learned(over([&first, &second, &third])), learned(distgpipe::Workers::Threads));
    assert!(threads.len() > 300, "{} tensors", threads.len());
    for (name, bits) in &threads {
        assert!(servers.get(name) == Some(bits), "{name} differs");
    }
}

/// These servers as workers that get labels.
fn over(servers: [&Serve; 3]) -> distgpipe::Workers {
    let servers = servers.map(|server| {
        let parsed: distgpipe::JoinString = server.join_string.parse().expect("a join string");
        distgpipe::JoinString { addresses: vec![server.address.clone()], ..parsed }
    });
    distgpipe::Workers::Servers { servers: servers.into(), labels_leave: true, listen: None }
}

/// The bits of everything that two replicas of a model with batch norms and dropout have learned after two steps, and of the gradients
/// of a third one.
fn learned(workers: distgpipe::Workers) -> BTreeMap<String, Vec<u8>> {
    use distgpipe::prelude::*;
    use distgpipe::tch::{Device as TorchDevice, Kind, Tensor};
    use distgpipe::zoo::MobileNetV2;
    let model = MobileNetV2 { width: 0.25, image: 16, strides: [1, 1, 2, 1, 1, 1, 2, 1], ..MobileNetV2::default() };
    let builder = Pipeline::builder(model.model().expect("a model")).device(Device::Cpu).threads(1).learning_rate(0.01);
    let builder = builder.balance([9, 11]).place("client,server").micro_batches(2).replicas(2).workers(workers);
    let mut pipeline = builder.build().unwrap_or_else(|failure| panic!("{failure}"));
    let x = (Tensor::arange(13 * 768, (Kind::Float, TorchDevice::Cpu)).view([13, 3, 16, 16]) * 0.37).sin();
    let batch = Batch::new(x, Tensor::arange(13, (Kind::Int64, TorchDevice::Cpu)).remainder(10));
    for _ in 0..2 {
        assert!(pipeline.train_step(&batch).unwrap_or_else(|error| panic!("{error}")).loss < 4.0);
    }
    let gradients = pipeline.gradients(&batch).unwrap_or_else(|error| panic!("{error}")).1;
    let state = pipeline.state().unwrap_or_else(|error| panic!("{error}"));
    let gradients = gradients.into_iter().map(|(name, tensor)| (format!("gradient of {name}"), tensor));
    let bits = |tensor: &Tensor| distgpipe::engine::bytes(&tensor.contiguous()).expect("dense").to_vec();
    gradients.chain(state).map(|(name, tensor)| (name, bits(&tensor))).collect()
}

/// In the data, in the handshake of TLS, and in the first frames after it.
const CUTS: [usize; 5] = [25_000, 300, 15_000, 2_500, 15_000];

#[test]
fn a_connection_to_a_server_that_is_cut_is_restored_and_no_bit_changes() {
    let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").to_string();
    let (outside, left_outside) = cutting_relay(port.clone(), &CUTS);
    let mut server = Serve::start("serve-cut", &["--dial", &outside]);
    let (join_string, address) = (server.join_string.clone(), server.address.clone());
    let split = |address: &str, listen: Option<String>| {
        losses_over(&[(&join_string, address)], "client,server,client", vec![1, 2, 1], listen)
    };
    let undisturbed = split(&address, None);
    // The place of a run is free when its process has ended.
    server.wait_for_ends(1);
    // The client connects, and connects again.
    let (relay, left) = cutting_relay(address, &CUTS);
    assert_eq!(split(&relay, None), undisturbed);
    assert!(left.lock().expect("not poisoned").is_empty(), "not all cuts have happened");
    server.wait_for_ends(2);
    // The server connects, and connects again.
    assert_eq!(split("unreachable.invalid:1", Some(port)), undisturbed);
    assert!(left_outside.lock().expect("not poisoned").is_empty(), "not all cuts have happened");
    // All that was one run each time.
    let count = |server: &Serve| server.seen.iter().filter(|line| line.contains(": process ")).count();
    server.wait_for_ends(3);
    assert_eq!(count(&server), 3, "{:#?}", server.seen);
}

/// The job of one server reaches the other through its gateway, and so it does again.
#[test]
fn a_connection_between_servers_that_is_cut_is_restored_and_no_bit_changes() {
    let mut second = Serve::start("serve-cut-second", &[]);
    let (relay, left) = cutting_relay(second.address.clone(), &[]);
    let mut first = Serve::start("serve-cut-first", &["--allow", &second.address, "--allow", &relay]);
    let over = |first: &Serve, second: &Serve, address: &str| {
        let servers = [(&first.join_string[..], &first.address[..]), (&second.join_string[..], address)];
        losses_over(&servers, "client,a,b,client", vec![1, 1, 1, 1], None)
    };
    let undisturbed = over(&first, &second, &second.address);
    first.wait_for_ends(1);
    second.wait_for_ends(1);
    left.lock().expect("not poisoned").extend(CUTS.into_iter().chain(CUTS));
    assert_eq!(over(&first, &second, &relay), undisturbed);
    assert!(left.lock().expect("not poisoned").is_empty(), "not all cuts have happened");
}

/// While there is no connection, the user reads which server it is that is being reconnected to.
#[test]
fn a_client_says_which_server_it_is_reconnecting_to() {
    let server = Serve::start("serve-reconnecting", &[]);
    // The run has begun when the first connection is cut, and each of the attempts after that waits a little longer.
    let (relay, left) = cutting_relay(server.address.clone(), &[[60_000].as_slice(), &[1; 17]].concat());
    let parsed: distgpipe::JoinString = server.join_string.parse().expect("a join string");
    let through = distgpipe::JoinString { addresses: vec![relay], ..parsed };
    let joined = server.client(&["join", "gpu-box"], Some(&through.to_text()));
    assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
    let run = server.client(&[&TRAIN[..], &["--server", "gpu-box", "--epochs", "2"]].concat(), None);
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && left.lock().expect("not poisoned").is_empty(), "{said}");
    assert!(said.contains("reconnecting to gpu-box, 1 s") && said.contains("reconnected to gpu-box after"), "{said}");
}

/// Every byte that leaves the client, before encryption, in split learning, with evaluation and prediction. The search finds labels
/// and numbers of samples where they do leave.
#[test]
fn no_input_label_or_sample_leaves_the_client_in_split_learning() {
    use distgpipe::prelude::*;
    use distgpipe::tch::{Device as TorchDevice, Kind, Tensor};
    let server = Serve::start("serve-capture", &["--insecure"]);
    let token: distgpipe::Token = server.secret().parse().expect("a secret");
    let samples: Vec<u64> = (0..16).map(|row| 0x1d5a_3c96_e207_4b00 + 7 * row).collect();
    let delta = CodecPolicy::all("delta(tile:8)".parse().expect("a codec"));
    for (balance, place, leaves, codecs) in [
        (vec![1, 2, 1], "client,server,client", false, CodecPolicy::default()),
        (vec![2, 2], "client,server", true, delta),
    ] {
        let (address, captured) = capture(server.address.clone());
        let mut pipeline = Pipeline::builder(Mlp::default().model().expect("a model"))
            .balance(balance)
            .place(place)
            .micro_batches(2)
            .codecs(codecs)
            .device(Device::Cpu)
            .threads(1)
            .workers(Workers::Remote { addresses: vec![address], token })
            .build()
            .expect("it starts");
        let x = Tensor::rand([16, 1, 8, 8], (Kind::Float, TorchDevice::Cpu));
        let y = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]);
        let batch = Batch { samples: samples.clone(), ..Batch::new(x.shallow_clone(), y.shallow_clone()) };
        for _ in 0..2 {
            pipeline.train_step(&batch).expect("a step");
        }
        pipeline.evaluate(&batch).expect("an evaluation");
        drop(pipeline.predict(vec![x.shallow_clone()]).expect("a prediction"));
        drop(pipeline);
        let sent = captured.lock().expect("not poisoned").clone();
        assert!(sent.len() > 10_000, "{}", sent.len());
        let has = |pattern: &[u8]| sent.windows(pattern.len()).any(|window| window == pattern);
        let values = Vec::<f32>::try_from(x.flatten(0, -1)).expect("floats");
        for four in values.chunks(4) {
            let bytes: Vec<u8> = four.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert!(!has(&bytes), "{place}: inputs left the client");
        }
        let labels = Vec::<i64>::try_from(&y).expect("integers");
        for size in [8, 4] {
            let of_width = |label: &i64| label.to_le_bytes().into_iter().take(size);
            let bytes: Vec<u8> = labels[..4].iter().flat_map(of_width).collect();
            assert_eq!(has(&bytes), leaves && size == 8, "{place}: labels of {size} bytes");
        }
        // As a codec or a command would send them.
        let found = samples.iter().filter(|&&id| has(&id.to_le_bytes()) || has(id.to_string().as_bytes()));
        assert_eq!(found.count(), if leaves { samples.len() } else { 0 }, "{place}: numbers of samples");
    }
}
