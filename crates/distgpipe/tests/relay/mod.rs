//! A relay between a driver and a worker that carries so many bytes per second in each direction, as a slow link does.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How much it forwards at once.
const CHUNK: usize = 16 << 10;

/// Listens on a port of its own, and forwards one connection to `to`. Returns where it listens.
pub fn relay(to: SocketAddr, bytes_per_s: f64) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        let (near, _) = listener.accept().expect("a driver");
        let far = TcpStream::connect(to).expect("the worker listens");
        for (from, to) in [(&near, &far), (&far, &near)] {
            let (from, to) = (from.try_clone().expect("a handle"), to.try_clone().expect("a handle"));
            std::thread::spawn(move || forward(from, to, bytes_per_s));
        }
    });
    address
}

fn forward(mut from: TcpStream, mut to: TcpStream, bytes_per_s: f64) {
    to.set_nodelay(true).expect("a socket");
    let mut buffer = [0; CHUNK];
    let mut free_at = Instant::now();
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        // A busy machine delays this thread; it may catch up on that, but not on time in which nothing came.
        free_at = free_at.max(Instant::now() - Duration::from_millis(50));
        free_at += Duration::from_secs_f64(bytes as f64 / bytes_per_s);
        std::thread::sleep(free_at.saturating_duration_since(Instant::now()));
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
