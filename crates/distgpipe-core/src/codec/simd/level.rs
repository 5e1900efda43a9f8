//! Which instruction set the kernels use: the best one of this processor, or the one named by an environment variable.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// The environment variable that selects the instruction set of the codecs' kernels: `portable`, `avx2` or `avx512`. It
/// is read once, when the first codec is made.
///
/// It exists so that tests and benchmarks can cover every version of the kernels on one machine. A value that is
/// unknown, or that this processor lacks, is ignored: the kernels then use the best instruction set there is. A test
/// that sets the variable must therefore compare it with [`simd_level`], which reports the instruction set in use.
pub const SIMD_VARIABLE: &str = "DISTGPIPE_SIMD";

/// An instruction set that the codecs' kernels are written for. The bytes that codecs produce do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum SimdLevel {
    /// Plain Rust, compiled for the target's baseline.
    Portable,
    /// AVX2 with FMA, F16C, BMI1 and BMI2: Haswell, Zen.
    Avx2,
    /// AVX-512 with F, BW, DQ, VL, VBMI and VBMI2: Ice Lake, Zen 4.
    Avx512,
}

impl SimdLevel {
    /// Every level, the slowest first.
    pub const ALL: [SimdLevel; 3] = [SimdLevel::Portable, SimdLevel::Avx2, SimdLevel::Avx512];
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            SimdLevel::Portable => "portable",
            SimdLevel::Avx2 => "avx2",
            SimdLevel::Avx512 => "avx512",
        })
    }
}

/// The error of parsing a [`SimdLevel`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected `portable`, `avx2` or `avx512` as the instruction set, got `{got}`")]
pub struct SimdLevelError {
    /// The beginning of the text.
    pub got: String,
}

impl FromStr for SimdLevel {
    type Err = SimdLevelError;

    fn from_str(text: &str) -> Result<Self, SimdLevelError> {
        let level = SimdLevel::ALL.into_iter().find(|level| level.to_string() == text);
        level.ok_or_else(|| SimdLevelError { got: text.chars().take(40).collect() })
    }
}

/// The instruction set that the codecs' kernels use in this process. See [`SIMD_VARIABLE`] for how to choose it.
pub fn simd_level() -> SimdLevel {
    Level::in_use().0
}

/// An instruction set that this processor has. Only this module makes one, and only after detection, so a `Level` is
/// the proof that calling the kernels compiled for it is sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::codec) struct Level(SimdLevel);

impl Level {
    /// The level that new codecs use.
    pub fn in_use() -> Level {
        #[cfg(test)]
        if let Some(level) = FORCED.get() {
            return level;
        }
        static IN_USE: OnceLock<Level> = OnceLock::new();
        *IN_USE.get_or_init(|| {
            let requested = std::env::var(SIMD_VARIABLE).ok().and_then(|text| text.parse().ok());
            requested.and_then(Level::if_available).unwrap_or_else(Level::best)
        })
    }

    /// The best level that this processor has.
    fn best() -> Level {
        let available = SimdLevel::ALL.into_iter().rev().find_map(Level::if_available);
        available.unwrap_or(Level(SimdLevel::Portable))
    }

    /// The level, if this processor has all of its instructions.
    fn if_available(level: SimdLevel) -> Option<Level> {
        (level <= detected()).then_some(Level(level))
    }

    #[inline(always)]
    pub(super) fn instructions(self) -> SimdLevel {
        self.0
    }

    /// Whether kernels keep tables of 16 `f32` in registers, where they are looked up faster than in memory.
    pub fn has_register_tables(self) -> bool {
        self.0 != SimdLevel::Portable
    }
}

/// The best level of this processor. Every level includes those before it.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn detected() -> SimdLevel {
    use std::arch::is_x86_feature_detected as has;
    if !(has!("avx2") && has!("fma") && has!("f16c") && has!("bmi1") && has!("bmi2") && has!("popcnt")) {
        return SimdLevel::Portable;
    }
    let wide = has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
    if wide && has!("avx512vbmi") && has!("avx512vbmi2") {
        SimdLevel::Avx512
    } else {
        SimdLevel::Avx2
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn detected() -> SimdLevel {
    SimdLevel::Portable
}

#[cfg(test)]
thread_local! {
    static FORCED: std::cell::Cell<Option<Level>> = const { std::cell::Cell::new(None) };
}

#[cfg(test)]
impl Level {
    /// Every level that this processor has, the portable one first.
    pub fn all_here() -> Vec<Level> {
        SimdLevel::ALL.into_iter().filter_map(Level::if_available).collect()
    }

    /// Calls `then` with [`Level::in_use`] set to this level on this thread. Codecs made inside use it.
    pub fn force<R>(self, then: impl FnOnce() -> R) -> R {
        let before = FORCED.replace(Some(self));
        let result = then();
        FORCED.set(before);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_in_use_is_one_that_this_processor_has() {
        assert!(Level::all_here().contains(&Level::in_use()));
        assert_eq!(Level::all_here().first(), Some(&Level(SimdLevel::Portable)));
        assert_eq!(Level::all_here().last(), Some(&Level::best()));
    }

    #[test]
    fn levels_are_words() {
        for level in SimdLevel::ALL {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
        let error = "AVX512".parse::<SimdLevel>().unwrap_err();
        assert_eq!(error.to_string(), "expected `portable`, `avx2` or `avx512` as the instruction set, got `AVX512`");
    }
}
