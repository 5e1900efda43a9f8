//! docs/wire.md says what the code does: its bytes are those of the committed encodings, its tables and JSON are the code's, and
//! `scripts/wire_client.py`, which was written from the page, trains with a real worker.

use distgpipe::comm::handshake::Token;
use distgpipe::comm::protocol::{Command, Job};
use distgpipe::comm::server_identity::{JoinString, PublicKey};
use distgpipe::comm::transport::{limits, tls};
use distgpipe_core::codec::ALL;
use distgpipe_core::wire::{
    AbortNotice, DType, Hello, Kind, Layout, Refuse, Role, Welcome, ELEMENTS_MAX, HEADER_BYTES, VERSION,
};
use distgpipe_core::WorkerId;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command as Process, Stdio};

const PAGE: &str = include_str!("../../../docs/wire.md");
const HEADERS: &str = include_str!("../../distgpipe-core/tests/wire_frame.hex");

/// The code blocks of the page in this language.
fn blocks(language: &str) -> Vec<&'static str> {
    let start = format!("```{language}\n");
    PAGE.split(&start).skip(1).map(|rest| rest.split("```").next().expect("split has a first part")).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn the_bytes_of_the_page_are_those_of_the_code() {
    let run = *b"0123456789abcdef";
    let (role, build) = (Role::Worker(WorkerId(7)), "0.1.0".to_owned());
    let hello = Hello { run, token: [0xa5; 32], role, epoch: 3, next: 258, build: build.clone() };
    let notice = AbortNotice { worker: "w1".to_owned(), phase: "2F0".to_owned(), message: "é".to_owned() };
    let (secret, exporter) = (Token([0x5e; 32]), std::array::from_fn(|i| i as u8));
    let messages = [
        ("Claim", tls::claim(&secret, None, &exporter, &build)),
        ("Answer", tls::acceptance(&secret, None, &exporter)),
        ("Hello", hello.encode()),
        ("Welcome", Welcome { worker: Some(WorkerId(258)), next: 1, build }.encode()),
        ("Refuse", Refuse { reason: "full".to_owned() }.encode()),
        ("Abort", notice.encode()),
    ];
    let mut seen = Vec::new();
    for line in blocks("hex").iter().flat_map(|block| block.lines()) {
        let (name, digits) = line.split_once(' ').expect("a name and bytes");
        let is_header = HEADERS.lines().any(|committed| committed == line);
        let of_message = messages.iter().find(|(message, _)| *message == name);
        let is_message = of_message.is_some_and(|(_, bytes)| hex(bytes) == digits.replace(' ', ""));
        assert!(is_header || is_message, "{line}");
        seen.push(name);
    }
    assert_eq!(seen, ["Claim", "Answer", "Ping", "Activation", "Hello", "Welcome", "Refuse", "Abort"]);
}

#[test]
fn the_join_string_of_the_page_is_that_of_the_code() {
    let addresses = vec!["gpu-box:7443".to_owned(), "[2001:db8::1]:7443".to_owned()];
    let example = JoinString { addresses, key: PublicKey([0xab; 32]), secret: Token([0x5e; 32]) };
    let text = format!("{}\n", example.to_text());
    assert!(blocks("text").contains(&&text[..]), "{text}");
}

#[test]
fn the_numbers_of_the_page_are_those_of_the_code() {
    let has = |text: String| assert!(PAGE.contains(&text), "{text}");
    has(format!("version {VERSION} of the format"));
    has(format!("| 4 | 2 | version | {VERSION};"));
    has(format!("a header of {HEADER_BYTES} bytes"));
    has(format!("| 128 | {} | checksum |", HEADER_BYTES - 128));
    for kind in Kind::ALL {
        has(format!("| {} | {kind} | ", kind.number()));
    }
    for dtype in DType::ALL {
        has(format!("| {} | {dtype} | {} |", dtype.number(), dtype.size_bytes()));
    }
    for member in ALL {
        has(format!("| {} | {} |\n", member.id.number(), member.name));
    }
    assert_eq!((Layout::Contiguous.number(), Layout::ChannelsLast.number()), (1, 2));
    let limits = limits();
    has(format!("| body of Hello, Welcome, Refuse | {} KiB |", limits.handshake_bytes_max >> 10));
    has(format!("| body of Job | {} MiB |", limits.job_bytes_max >> 20));
    has(format!("Goodbye, Probe | {} MiB |", limits.text_bytes_max >> 20));
    has(format!("| a tensor, encoded and decoded | {} GiB,", limits.body_bytes_max >> 30));
    has(format!("| tensors of one message; of one State message | {}; 1 |", limits.tensors_per_message_max));
    assert_eq!(ELEMENTS_MAX, (1 << 60) - 1);
}

/// What the code reads from the JSON of the page, it writes again in the same way.
#[test]
fn the_json_of_the_page_is_a_job_and_commands() {
    let blocks = blocks("json");
    let [job, commands] = &blocks[..] else { panic!("expected a job and commands, got {}", blocks.len()) };
    let parsed: Job = serde_json::from_str(job).expect("a job");
    parsed.topology().expect("a valid plan");
    assert_eq!(serde_json::to_value(&parsed).unwrap(), serde_json::from_str::<Value>(job).unwrap());
    let mut names = Vec::new();
    for line in commands.lines() {
        let command: Command = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        assert_eq!(serde_json::to_string(&command).unwrap(), line);
        names.push(match command {
            Command::Step(_) => "step",
            Command::SyncReplicas => "agree",
            Command::SkipStep => "rest",
            Command::Update { .. } => "update",
            Command::Collect { .. } => "collect",
            Command::Load { .. } => "load",
            Command::ResetCodecs => "forget",
            Command::Finish => "finish",
        });
    }
    assert_eq!(names, ["step", "update", "collect", "load", "forget", "agree", "rest", "finish"]);
    for after in [r#""keep""#, r#""norms""#, r#"{"update":{"learning_rate":0.1}}"#] {
        let line = commands.lines().next().expect("a step").replace(r#""keep""#, after);
        serde_json::from_str::<Command>(&line).unwrap_or_else(|e| panic!("{line}: {e}"));
    }
}

struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_client_that_was_written_from_the_page_trains_with_a_worker() {
    let token = "19".repeat(32);
    let mut worker = Process::new(env!("CARGO_BIN_EXE_distgpipe"));
    worker.arg("worker").env("DISTGPIPE_TOKEN", &token).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut worker = Worker(worker.spawn().expect("the binary was built with this test"));
    let mut line = String::new();
    BufReader::new(worker.0.stdout.take().expect("piped")).read_line(&mut line).expect("text");
    let address = line.trim_end().strip_prefix("listening ").expect("an address");
    let client = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/wire_client.py");
    let run = |token: &str| {
        let mut python = Process::new("python3");
        let output = python.args([client, address]).env("DISTGPIPE_TOKEN", token).output().expect("Python 3");
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let expected = concat!(
        "welcome from distgpipe ",
        env!("CARGO_PKG_VERSION"),
        "\nready\nactivation 3 5 of 60 bytes\ngradient 3 5 of 60 bytes\nreport of 8 phases\ngoodbye\n"
    );
    let (status, said, errors) = run(&token);
    assert_eq!((status, &said[..]), (Some(0), expected), "{errors}");
    let (status, _, errors) = run(&"20".repeat(32));
    assert!(status == Some(1) && errors.starts_with("refused: the two ends have different tokens"), "{errors}");
}
