//! `distgpipe serve` as its clients and attackers meet it.

// Each test program has use for some of these.
#![allow(dead_code)]

use crate::command::{directory, distgpipe, logged};
use distgpipe::comm::transport::limits;
use distgpipe_core::wire::{Header, HEADER_BYTES};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a test waits for something that takes much less.
pub const LIMIT: Duration = Duration::from_secs(120);

/// A server that a test started, in a directory of its own, which is also the configuration of its clients.
pub struct Serve {
    pub child: Child,
    pub folder: PathBuf,
    pub address: String,
    pub join_string: String,
    /// The lines of its log.
    pub lines: Receiver<String>,
    /// What it prints on standard output after its address, once it has ended.
    pub printed: Receiver<String>,
    pub seen: Vec<String>,
}

impl Serve {
    pub fn start(name: &str, flags: &[&str]) -> Self {
        let mut server = Self::listen("127.0.0.1:0", directory(name), flags);
        let identity = server.folder.join("identity");
        let joining = ["serve", "--join-string", "--listen", &server.address, "--identity", path(&identity)];
        let printed = distgpipe(&joining).output().expect("the binary was built with this test");
        server.join_string = String::from_utf8_lossy(&printed.stdout).trim_end().to_owned();
        let joined = server.client(&["join", "box"], Some(&server.join_string));
        assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
        server
    }

    /// A server with the identity in this folder, or a new one.
    fn listen(address: &str, folder: PathBuf, flags: &[&str]) -> Self {
        let mut child = distgpipe(&["serve"])
            .args(["--listen", address, "--device", "cpu", "--identity"])
            .arg(folder.join("identity"))
            .args(flags)
            .spawn()
            .expect("the binary was built with this test");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let mut first = String::new();
        output.read_line(&mut first).expect("text");
        let address = first.trim_end().strip_prefix("listening ").unwrap_or_else(|| panic!("{first}")).to_owned();
        let lines = error_lines(&mut child);
        let (sender, printed) = mpsc::channel();
        std::thread::spawn(move || {
            let mut rest = String::new();
            output.read_to_string(&mut rest).map(|_| sender.send(rest))
        });
        Serve { child, folder, address, join_string: String::new(), lines, printed, seen: Vec::new() }
    }

    /// Kills the server and the process of its run, which was started after so many others, as the loss of power does.
    pub fn lose_power(&mut self, others: usize) {
        let run = self.process_of_run(others);
        kill(&[self.child.id(), run]);
        self.child.wait().expect("it was killed");
    }

    /// Starts a server that was killed again, at the same address and with the same identity.
    pub fn start_again(&mut self) {
        let mut again = Self::listen(&self.address, self.folder.clone(), &[]);
        again.join_string = self.join_string.clone();
        *self = again;
    }

    /// A command of a client that has joined this server as `box`.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = distgpipe(arguments);
        command.env("XDG_CONFIG_HOME", self.folder.join("config"));
        command
    }

    pub fn client(&self, arguments: &[&str], input: Option<&str>) -> Output {
        let mut command = self.command(arguments);
        if input.is_some() {
            command.stdin(Stdio::piped());
        }
        let mut child = command.spawn().expect("the binary was built with this test");
        if let Some(text) = input {
            writeln!(child.stdin.take().expect("piped"), "{text}").expect("it reads");
        }
        child.wait_with_output().expect("it ends")
    }

    /// Trains for a few steps over this server, and returns the losses.
    pub fn train(&self, log: &str, more: &[&str]) -> Vec<f64> {
        let log = self.folder.join(log);
        let output = self.client(&[&TRAIN[..], &["--server", "box", "--log", path(&log)], more].concat(), None);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        losses(&log)
    }

    /// Waits until so many runs have ended here, with their processes.
    pub fn wait_for_ends(&mut self, ends: usize) {
        self.wait_for_lines("ended after", ends);
    }

    /// Waits until so many lines of the log contain this text. Returns the last of them.
    pub fn wait_for_lines(&mut self, text: &str, count: usize) -> String {
        loop {
            let with_it = || self.seen.iter().filter(|line| line.contains(text));
            match with_it().nth(count - 1) {
                Some(line) => return line.clone(),
                None => match self.lines.recv_timeout(LIMIT) {
                    Ok(line) => self.seen.push(line),
                    Err(_) => panic!("expected {count} lines with {text:?}, got {:#?}", self.seen),
                },
            }
        }
    }

    /// The number of the process of the run that was started after so many others.
    pub fn process_of_run(&mut self, others: usize) -> u32 {
        let line = self.wait_for_lines(": process ", others + 1);
        line.rsplit(' ').next().and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{line}"))
    }

    /// Waits for a line of the log that contains this text.
    pub fn wait_for(&mut self, text: &str) -> String {
        self.wait_for_lines(text, 1)
    }

    /// The secret in the join string.
    pub fn secret(&self) -> &str {
        self.join_string.split(':').nth(3).expect("a secret")
    }

    /// The number of files and sockets that the server has open, and of its threads.
    pub fn resources(&self) -> (usize, usize) {
        let count = |what: &str| {
            let folder = format!("/proc/{}/{what}", self.child.id());
            std::fs::read_dir(folder).expect("it runs").count()
        };
        (count("fd"), count("task"))
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The lines that a process writes to standard error, as it writes them.
fn error_lines(child: &mut Child) -> Receiver<String> {
    let errors = BufReader::new(child.stderr.take().expect("piped"));
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || errors.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    lines
}

/// The bytes of the tensors in a safetensors file.
pub fn tensor_bytes(file: &Path) -> Vec<u8> {
    let bytes = std::fs::read(file).expect("weights");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    bytes[8 + header..].to_vec()
}

/// Kills processes at once.
pub fn kill(processes: &[u32]) {
    let numbers = processes.iter().map(u32::to_string);
    assert!(Command::new("kill").arg("-KILL").args(numbers).status().expect("kill").success(), "{processes:?}");
}

/// A run in progress, and what it says. It is killed with this value.
pub struct Client {
    pub child: Child,
    lines: Receiver<String>,
    pub said: Vec<String>,
}

impl Client {
    pub fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::null()).spawn().expect("the binary was built with this test");
        let lines = error_lines(&mut child);
        Client { child, lines, said: Vec::new() }
    }

    /// Waits for a line that contains this text and comes after those that were waited for.
    pub fn wait_for(&mut self, text: &str) {
        loop {
            let line = self.lines.recv_timeout(LIMIT);
            let line = line.unwrap_or_else(|_| panic!("expected {text:?}, got {:#?}", self.said));
            self.said.push(line);
            if self.said.last().is_some_and(|line| line.contains(text)) {
                return;
            }
        }
    }

    /// Forgets what it has said until now.
    pub fn skip(&mut self) {
        self.said.extend(self.lines.try_iter());
    }

    /// Waits for its end, which must be a success. Returns what it has said.
    pub fn end(mut self) -> Vec<String> {
        let status = self.child.wait().expect("it ends");
        self.said.extend(self.lines.iter());
        assert!(status.success(), "{:#?}", self.said);
        std::mem::take(&mut self.said)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Split learning of a small network, a few steps.
pub const TRAIN: [&str; 15] = [
    "train",
    "--model",
    "mlp",
    "--balance",
    "1,2,1",
    "--place",
    "client,server,client",
    "--steps",
    "4",
    "--limit",
    "256",
    "--batch",
    "32",
    "--no-evaluate",
    "--chunks=4",
];

pub fn path(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

pub fn losses(log: &Path) -> Vec<f64> {
    logged(log, "step").iter().map(|line| line["loss"].as_f64().expect("a number")).collect()
}

/// Passes connections on to an address, and keeps what the clients send.
pub fn capture(to: String) -> (String, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let captured = Arc::new(Mutex::new(Vec::new()));
    let kept = captured.clone();
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let far = TcpStream::connect(&to).expect("it listens");
            let (mut from, mut back) = (near.try_clone().expect("a handle"), near);
            let (mut into, mut answers) = (far.try_clone().expect("a handle"), far);
            std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
            let kept = kept.clone();
            std::thread::spawn(move || {
                let mut buffer = [0; 1 << 16];
                while let Ok(read @ 1..) = from.read(&mut buffer) {
                    kept.lock().expect("not poisoned").extend(&buffer[..read]);
                    if into.write_all(&buffer[..read]).is_err() {
                        break;
                    }
                }
            });
        }
    });
    (address, captured)
}

/// The frames in these bytes: header and body.
pub fn frames(mut bytes: &[u8]) -> Vec<(Header, Vec<u8>)> {
    let mut all = Vec::new();
    while let Some(head) = bytes.first_chunk::<HEADER_BYTES>() {
        let header = Header::decode(head, &limits()).expect("a valid header");
        let end = HEADER_BYTES + usize::try_from(header.body_bytes).expect("a small body");
        let Some(body) = bytes.get(HEADER_BYTES..end) else { break };
        all.push((header, body.to_vec()));
        bytes = &bytes[end..];
    }
    all
}
