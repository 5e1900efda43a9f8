//! Worker processes that serve one run after the other, as on other machines.

use distgpipe::comm::handshake::Token;
use distgpipe::Workers;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// The token of all of them.
#[allow(dead_code)]
pub const TOKEN: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

/// Worker processes, ended with this value.
pub struct Servers {
    children: Vec<Child>,
    addresses: Vec<String>,
}

impl Servers {
    pub fn start(count: usize) -> Self {
        let mut servers = Servers { children: vec![], addresses: vec![] };
        for _ in 0..count {
            let mut child = Command::new(env!("CARGO_BIN_EXE_distgpipe"))
                .args(["worker", "--listen", "127.0.0.1:0"])
                .env("DISTGPIPE_TOKEN", TOKEN)
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .expect("the worker starts");
            let mut line = String::new();
            let stdout = child.stdout.take().expect("piped");
            servers.children.push(child);
            BufReader::new(stdout).read_line(&mut line).expect("the worker says where it listens");
            let address = line.trim().strip_prefix("listening ").unwrap_or_else(|| panic!("got `{line}`"));
            servers.addresses.push(address.to_owned());
        }
        servers
    }

    /// The first `count` of them, as the workers of a run beside worker 0.
    #[allow(dead_code)]
    pub fn first(&self, count: usize) -> Workers {
        Workers::Remote { addresses: self.addresses[..count].to_vec(), token: TOKEN.parse::<Token>().expect("a token") }
    }

    /// Where they listen.
    #[allow(dead_code)]
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
