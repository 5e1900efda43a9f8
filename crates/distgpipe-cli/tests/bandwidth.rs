//! `distgpipe bandwidth` between processes of this host. `serve.rs` has its test with a server.

mod command;

use command::{directory, fine, json, refused};

#[test]
fn plain_and_tls_are_measured_with_every_codec_and_size() {
    let plot = directory("bandwidth").join("plot.svg");
    let plot = plot.to_str().expect("a plain path");
    let flags = ["--workers", "2", "--sizes", "256KiB,4KiB", "--codec", "raw,tile:4", "--seconds", "0.02"];
    let result = json(&[&["bandwidth", "--json", "--plot", plot], &flags[..]].concat());
    let links = result["links"].as_array().expect("links");
    let transports: Vec<_> = links.iter().map(|link| link["transport"].as_str()).collect();
    assert_eq!(transports, [Some("tcp"), Some("tls")]);
    for link in links {
        assert!(link["round_trip_s"].as_f64().is_some_and(|seconds| seconds > 0.0), "{link}");
        let rows = link["measurements"].as_array().expect("measurements");
        let shown: Vec<_> = rows.iter().map(|row| (row["codec"].as_str(), row["tensor_bytes"].as_u64())).collect();
        let expected = ["raw", "tile:4"].map(|codec| [4096, 262_144].map(|bytes| (Some(codec), Some(bytes))));
        assert_eq!(shown, expected.concat());
        for row in rows {
            assert!(row["round_trip_s"].as_f64() > link["round_trip_s"].as_f64().map(|least| least / 2.0), "{row}");
            // A header of 136 bytes, and 32 bits per value; or 4 bytes of parameters, and 4 bits per value and 32 for every 64.
            let values = row["tensor_bytes"].as_f64().expect("a size") / 4.0;
            let (parameters, bits) = if row["codec"] == "raw" { (0.0, 32.0) } else { (4.0, 4.5) };
            for direction in ["there", "back"] {
                let figures = &row[direction];
                let figure = |name: &str| figures[name].as_f64().unwrap_or_else(|| panic!("{name}: {figures}"));
                assert_eq!(figure("frame_bytes"), 136.0 + parameters + values * bits / 8.0);
                let timed = figure("messages") * values * 4.0 / figure("seconds");
                assert!((figure("tensor_bytes_per_s") / timed - 1.0).abs() < 1e-9, "{figures}");
                let ratio = figure("wire_bytes_per_s") / figure("tensor_bytes_per_s");
                assert!((ratio / (figure("frame_bytes") / (values * 4.0)) - 1.0).abs() < 1e-9, "{figures}");
                assert!(["encode_s", "decode_s", "copy_s"].into_iter().all(|name| figure(name) >= 0.0), "{figures}");
                let limit = figures["limit"].as_str().expect("a limit");
                assert!(["wire", "encode", "decode", "copy"].contains(&limit), "{figures}");
            }
        }
    }
    let drawn = std::fs::read_to_string(plot).expect("a plot");
    assert_eq!(drawn.matches("<circle").count(), 8);
    for label in ["raw TCP", "raw TLS", "tile:4 TCP", "tile:4 TLS"] {
        assert_eq!(drawn.matches(&format!(">{label}</text>")).count(), 1, "{label}");
    }
    let table = fine(&["bandwidth", "--workers", "2", "--sizes", "4KiB", "--codec", "raw", "--seconds", "0.01"]);
    assert!(table.contains("over TCP, round trip") && table.contains("over TLS, round trip"), "{table}");
    assert!(table.contains("limited by"), "{table}");
}

#[test]
fn wrong_flags_are_refused_before_anything_is_started() {
    for (flags, said) in [
        (&[][..], "--server <NAME>"),
        (&["--workers", "3"], "--workers: expected 2, this process and another one; got 3"),
        (&["--workers", "2", "--server", "box"], "cannot be used with"),
        (&["--server", "nobody"], "expected one that you have joined"),
        (&["--workers", "2", "--codec", "tile:99"], "tile"),
        (&["--workers", "2", "--codec", "delta:2048(tile:4)"], "use a smaller `delta:MIB`"),
        (&["--workers", "2", "--sizes", "4000B"], "--sizes 4000B: expected a multiple of 4KiB, from 4KiB to 128MiB"),
        (&["--workers", "2", "--sizes", "256MiB"], "--sizes 256MiB"),
        (&["--workers", "2", "--seconds", "0"], "--seconds 0: expected seconds, from 0.001 to 10"),
        (&["--workers", "2", "--seconds", "NaN"], "--seconds"),
        (&["--workers", "2", "--threads", "0"], "--threads: expected 1 to 1024 threads"),
        (&["--workers", "2", "--plot", "/no/such/folder/plot.svg"], "--plot"),
    ] {
        let error = refused(2, &[&["bandwidth"], flags].concat());
        assert!(error.contains(said), "{flags:?}: {error}");
    }
}
