//! Checkpoints on a disk that stalls for longer than any peer may be silent, and is full afterwards. The run goes on with the older
//! checkpoint and ends with the weights of one that meets none of this.
//!
//! The disk is a file with a file system that this test mounts, freezes and fills, for which it needs root and loop devices. Without
//! them it says so and tests nothing; with `DISTGPIPE_DISK_TESTS=1` that is a failure.

mod command;
mod serving;

use serving::{path, Serve};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// A client gives a peer up that is silent for 20 s.
const STALL: Duration = Duration::from_secs(30);

/// A small file system of its own.
struct Disk(PathBuf);

fn system(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(arguments).output().map_err(|e| format!("{program}: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

impl Disk {
    fn mount(folder: &Path) -> Result<Self, String> {
        let (image, mounted) = (folder.join("disk.img"), folder.join("disk"));
        std::fs::create_dir_all(&mounted).expect("a folder");
        std::fs::File::create(&image).and_then(|file| file.set_len(32 << 20)).expect("a file");
        system("mkfs.ext4", &["-q", "-F", path(&image)])?;
        system("mount", &["-o", "loop", path(&image), path(&mounted)])?;
        Ok(Disk(mounted))
    }

    /// Whoever writes waits until this value is dropped, as on a disk that does not answer.
    fn freeze(&self) -> Result<Frozen<'_>, String> {
        system("fsfreeze", &["--freeze", path(&self.0)]).map(|()| Frozen(self))
    }

    /// Takes all the room that is left.
    fn fill(&self) -> PathBuf {
        let ballast = self.0.join("ballast");
        let mut file = std::fs::File::create(&ballast).expect("a file");
        for bytes in [1 << 20, 1 << 12] {
            while file.write_all(&vec![0; bytes]).is_ok() {}
        }
        // What is not on the disk yet has its room there.
        let _ = file.sync_all();
        ballast
    }
}

/// A disk that does not answer. Nobody can even kill a process that waits for it.
struct Frozen<'a>(&'a Disk);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        if let Err(error) = system("fsfreeze", &["--unfreeze", path(&self.0 .0)]) {
            eprintln!("{error}");
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = system("umount", &[path(&self.0)]) {
            eprintln!("{error}");
        }
    }
}

/// A client that runs, and what it says.
struct Client {
    child: Child,
    lines: Receiver<String>,
    said: Vec<String>,
}

impl Client {
    fn start(server: &Serve, folder: &Path) -> Self {
        let mut command = server.command(&["train", "--model", "mlp", "--set", "hidden=[256,256]", "--batch", "64"]);
        let child = command
            .args(["--place", "client,server,client", "--no-evaluate", "--epochs", "100000", "--steps", "600"])
            .args(["--lr", "0.01", "--server", "box", "--restarts", "0", "--checkpoint-every", "5"])
            .args(["--checkpoint", path(&folder.join("saved")), "--save", path(&folder.with_extension("safetensors"))])
            .stdout(Stdio::null())
            .spawn();
        let mut child = child.expect("the binary was built with this test");
        let errors = BufReader::new(child.stderr.take().expect("piped"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || errors.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Client { child, lines, said: Vec::new() }
    }

    /// Waits for a line that contains this text and comes after those that were waited for.
    fn wait_for(&mut self, text: &str) {
        loop {
            let line = self.lines.recv_timeout(serving::LIMIT);
            let line = line.unwrap_or_else(|_| panic!("expected {text:?}, got {:#?}", self.said));
            self.said.push(line);
            if self.said.last().is_some_and(|line| line.contains(text)) {
                return;
            }
        }
    }

    /// Forgets what it has said until now.
    fn skip(&mut self) {
        self.said.extend(self.lines.try_iter());
    }

    /// Waits for its end. Returns the bytes of the tensors that it has saved.
    fn weights(mut self, folder: &Path) -> Vec<u8> {
        let status = self.child.wait().expect("it ends");
        self.said.extend(self.lines.iter());
        assert!(status.success(), "{:#?}", self.said);
        let bytes = std::fs::read(folder.with_extension("safetensors")).expect("weights");
        let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        bytes[8 + header..].to_vec()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_disk_that_stalls_and_is_full_afterwards_delays_checkpoints_and_nothing_else() {
    let mut server = Serve::start("failing-disk", &[]);
    let mounted = Disk::mount(&server.folder).and_then(|disk| disk.freeze().map(drop).map(|()| disk));
    let disk = match mounted {
        Ok(disk) => disk,
        Err(error) if std::env::var_os("DISTGPIPE_DISK_TESTS").is_none() => {
            eprintln!(
                "NOT TESTED: this test mounts a file system of its own, which this user or machine may not: {error}"
            );
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let quiet = server.folder.join("quiet");
    std::fs::create_dir_all(&quiet).expect("a folder");
    let expected = Client::start(&server, &quiet).weights(&quiet);
    server.wait_for_ends(1);
    let mut client = Client::start(&server, &disk.0);
    client.wait_for("saved step");
    let frozen = disk.freeze().unwrap_or_else(|e| panic!("{e}"));
    let stalled = Instant::now();
    client.wait_for("the disk has not finished an operation for 5 s; training waits for it");
    std::thread::sleep(STALL.saturating_sub(stalled.elapsed()));
    client.skip();
    assert!(client.child.try_wait().expect("a child").is_none(), "it has ended: {:#?}", client.said);
    drop(frozen);
    client.wait_for("saved step");
    let ballast = disk.fill();
    client.wait_for("No space left on device");
    std::fs::remove_file(ballast).expect("it was made a moment ago");
    client.wait_for("saved step");
    assert!(client.weights(&disk.0) == expected, "other weights");
}
