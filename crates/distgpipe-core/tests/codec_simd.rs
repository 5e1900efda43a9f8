//! The codecs' kernels under the instruction set that `DISTGPIPE_SIMD` names: it is really in use, and the bytes are
//! the same under each.

use distgpipe_core::codec::{self, simd_level, CodecContext, CodecId, SimdLevel, TensorView, SIMD_VARIABLE};
use distgpipe_core::wire::{DType, Layout};
use std::process::{Command, Output};

/// A run of the tests with `DISTGPIPE_SIMD` set proves nothing about that instruction set if it was not in use.
#[test]
fn the_requested_instruction_set_is_in_use() {
    match std::env::var(SIMD_VARIABLE) {
        Ok(requested) => assert_eq!(
            simd_level().to_string(),
            requested,
            "{SIMD_VARIABLE} is not an instruction set of this processor; use portable, avx2 or avx512, as far as it has them"
        ),
        Err(_) => assert_eq!(Some(simd_level()), available().last().copied(), "without a request the best one is used"),
    }
}

/// Runs the test above in a process of its own.
fn requested(level: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "the_requested_instruction_set_is_in_use"]).env(SIMD_VARIABLE, level);
    command.output().unwrap()
}

/// What the processor has according to this test rather than to the crate.
fn available() -> Vec<SimdLevel> {
    let mut levels = vec![SimdLevel::Portable];
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx2") && has!("f16c") && has!("bmi1") && has!("bmi2") && has!("popcnt") {
            levels.push(SimdLevel::Avx2);
            let wide = has!("fma") && has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
            if wide && has!("avx512vbmi") && has!("avx512vbmi2") {
                levels.push(SimdLevel::Avx512);
            }
        }
    }
    levels
}

#[test]
fn every_instruction_set_of_the_processor_can_be_requested_and_no_other() {
    for level in SimdLevel::ALL {
        let output = requested(&level.to_string());
        assert_eq!(output.status.success(), available().contains(&level), "{level}: {output:?}");
    }
    for unknown in ["", "sse9", "AVX2", " avx2"] {
        assert!(!requested(unknown).status.success(), "`{unknown}` passed for an instruction set");
    }
}

/// The bodies of all codecs on one tensor, as FNV-1a hashes. Whatever the instruction set, thread or release: these are
/// the bytes on the wire. Only the bytes of `zstd` may change with the version of that library.
#[test]
fn the_bytes_do_not_depend_on_the_instruction_set() {
    let dims = [4, 33, 9, 10];
    let mut state = 1u32;
    let values = (0..dims.iter().product::<usize>()).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state as i32 as f32 / 1e9).max(-0.8)
    });
    let bytes: Vec<u8> = values.flat_map(f32::to_ne_bytes).collect();
    let samples = [3, 1, 4, 1];
    let mut hashes = Vec::new();
    for member in codec::ALL.iter().filter(|member| member.id != CodecId::Zstd) {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for text in member.examples {
            for layout in [Layout::Contiguous, Layout::ChannelsLast] {
                let mut codec = codec::parse(text).unwrap();
                let view = TensorView { dtype: DType::F32, dims: &dims, layout, bytes: &bytes };
                // Twice, for codecs that keep state.
                for seed in [5, 6] {
                    let mut body = Vec::new();
                    let context = CodecContext { seed, samples: &samples, ..CodecContext::default() };
                    codec.encode(view, &context, &mut body).unwrap();
                    hash = body.iter().fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
                }
            }
        }
        hashes.push(format!("{} {hash:016x}", member.name));
    }
    assert_eq!(hashes.join("\n"), include_str!("golden/codec_bodies.fnv").trim_end());
}
