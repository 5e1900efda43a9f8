//! A machine that restarts in the middle of a run: all processes of its worker are killed, and the worker is started again at the same
//! address. The run goes on by itself and ends with the weights of one that meets none of this.

mod command;
mod serving;

use command::distgpipe;
use serving::{kill, path, tensor_bytes, Client, Serve};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const TOKEN: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

/// 800 steps in epochs of 8, with Adam and dropout.
fn train(mut command: Command, folder: &Path, name: &str, more: &[&str]) -> Client {
    command.args([
        "train",
        "--model",
        "mlp",
        "--set",
        "hidden=[32,32]",
        "--set",
        "dropout=0.1",
        "--optimizer",
        "adam",
        "--lr",
        "0.001",
    ]);
    command.args([
        "--place",
        "client,server,client",
        "--limit",
        "256",
        "--batch",
        "32",
        "--no-evaluate",
        "--epochs",
        "100",
    ]);
    command.args(["--threads", "1", "--device", "cpu", "--restarts", "3", "--save", path(&saved(folder, name))]);
    command.args(more);
    Client::start(command)
}

fn saved(folder: &Path, name: &str) -> std::path::PathBuf {
    folder.join(format!("{name}.safetensors"))
}

fn weights(folder: &Path, name: &str) -> Vec<u8> {
    tensor_bytes(&saved(folder, name))
}

/// Waits until a run has something to go back to, has the worker lose its power, and starts it again when the run waits for it.
fn reboot<T>(mut run: Client, ready: &str, machine: &mut T, lose_power: impl Fn(&mut T), start_again: impl Fn(&mut T)) {
    run.wait_for(ready);
    lose_power(machine);
    run.wait_for("waiting for the workers, ");
    start_again(machine);
    let said = run.end();
    let restarted = said.iter().filter(|line| line.contains("all workers are back; continuing after step")).count();
    assert_eq!(restarted, 1, "{said:#?}");
}

#[test]
fn a_run_goes_on_when_the_machine_of_its_server_is_back() {
    let mut server = Serve::start("rebooted-server", &[]);
    let folder = server.folder.clone();
    train(server.command(&[]), &folder, "quiet", &["--server", "box"]).end();
    server.wait_for_ends(1);
    let expected = weights(&folder, "quiet");
    for (name, ready, more) in [
        ("checkpoint", "saved step", &["--checkpoint", path(&folder.join("saved")), "--checkpoint-every", "50"][..]),
        ("memory", "the state to restart from is kept in memory", &[]),
    ] {
        let run = train(server.command(&[]), &folder, name, &[&["--server", "box"], more].concat());
        // Each time, this server process has had another run before.
        reboot(run, ready, &mut server, |server| server.lose_power(1), Serve::start_again);
        server.wait_for_ends(1);
        assert!(weights(&folder, name) == expected, "{name}: other weights");
    }
}

/// A permanent worker, and where it listens.
struct Worker {
    child: Child,
    address: String,
}

impl Worker {
    fn start(address: &str) -> Self {
        let mut child = distgpipe(&["worker", "--listen", address])
            .env("DISTGPIPE_TOKEN", TOKEN)
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary was built with this test");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("text");
        let address = line.trim().strip_prefix("listening ").unwrap_or_else(|| panic!("{line}")).to_owned();
        Worker { child, address }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_run_goes_on_when_the_machine_of_its_worker_is_back() {
    let folder = command::directory("rebooted-worker");
    let mut worker = Worker::start("127.0.0.1:0");
    let with_token = |name: &str, worker: &Worker, more: &[&str]| {
        let mut command = distgpipe(&[]);
        command.env("DISTGPIPE_TOKEN", TOKEN);
        train(command, &folder, name, &[&["--workers", &worker.address], more].concat())
    };
    with_token("quiet", &worker, &[]).end();
    let run =
        with_token("disturbed", &worker, &["--checkpoint", path(&folder.join("saved")), "--checkpoint-every", "50"]);
    let lose_power = |worker: &mut Worker| {
        kill(&[worker.child.id()]);
        worker.child.wait().expect("it was killed");
    };
    let start_again = |worker: &mut Worker| *worker = Worker::start(&worker.address);
    reboot(run, "saved step", &mut worker, lose_power, start_again);
    assert!(weights(&folder, "disturbed") == weights(&folder, "quiet"), "other weights");
}

/// The client has room for what it trains, and not for twice the state of the whole model.
#[test]
fn a_run_without_room_for_a_copy_of_its_state_says_so_and_goes_on() {
    let worker = Worker::start("127.0.0.1:0");
    let mut limited = Command::new("sh");
    limited.args([
        "-c",
        &format!("ulimit -d {LIMIT_KIB}; exec \"$0\" \"$@\""),
        env!("CARGO_BIN_EXE_distgpipe"),
        "train",
    ]);
    limited.args(["--model", "mlp", "--set", "hidden=[64,4500,4500,64]", "--balance", "1,3,1", "--optimizer", "adam"]);
    limited.args([
        "--place",
        "client,server,client",
        "--steps",
        "2",
        "--batch",
        "16",
        "--no-evaluate",
        "--threads",
        "1",
    ]);
    limited
        .args(["--device", "cpu", "--workers", &worker.address])
        .env("DISTGPIPE_TOKEN", TOKEN)
        .stderr(Stdio::piped());
    let said = Client::start(limited).end();
    let expected = "warning: until there is a checkpoint, the loss of a worker ends the run (--restarts): a copy of the model and of \
                    the optimizer's state takes 5";
    assert!(said.iter().any(|line| line.contains(expected)), "{said:#?}");
}

/// More than a client takes, and less than it takes with two copies of 250 MB.
const LIMIT_KIB: u64 = 600 << 10;
