//! The sums behind the checksum of a large body, for the best instructions that the processor has: memory should be their limit.

/// How many sums there are of each kind: those of one vector of AVX-512.
pub const LANES: usize = 8;

/// The bytes that the lanes take at a time.
pub const BLOCK_BYTES: usize = 8 * LANES;

/// Two sums over lanes of 64-bit words, as in Fletcher's checksum: `a += word; b += a`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockSums {
    /// The sum of the words of each lane.
    pub a: [u64; LANES],
    /// The sum of the sums so far.
    pub b: [u64; LANES],
}

/// Instructions that the sums are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instructions {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Instructions {
    /// Those that this processor has, the best last.
    fn available() -> impl DoubleEndedIterator<Item = Self> {
        let all = [
            (Instructions::Portable, true),
            #[cfg(target_arch = "x86_64")]
            (Instructions::Avx2, is_x86_feature_detected!("avx2")),
            #[cfg(target_arch = "x86_64")]
            (Instructions::Avx512, is_x86_feature_detected!("avx512f")),
        ];
        all.into_iter().filter_map(|(instructions, has)| has.then_some(instructions))
    }
}

impl BlockSums {
    /// Adds whole blocks.
    pub fn add(&mut self, blocks: &[[u8; BLOCK_BYTES]]) {
        self.add_with(Instructions::available().next_back().unwrap_or(Instructions::Portable), blocks);
    }

    /// The processor must have the instructions.
    fn add_with(&mut self, instructions: Instructions, blocks: &[[u8; BLOCK_BYTES]]) {
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx512f")]
            fn with_avx512(sums: &mut BlockSums, blocks: &[[u8; BLOCK_BYTES]]) {
                add_inlined(sums, blocks);
            }
            #[target_feature(enable = "avx2")]
            fn with_avx2(sums: &mut BlockSums, blocks: &[[u8; BLOCK_BYTES]]) {
                add_inlined(sums, blocks);
            }
            match instructions {
                // SAFETY: `available` has found these instructions.
                Instructions::Avx512 => return unsafe { with_avx512(self, blocks) },
                // SAFETY: as above.
                Instructions::Avx2 => return unsafe { with_avx2(self, blocks) },
                Instructions::Portable => {}
            }
        }
        add_inlined(self, blocks);
    }
}

#[inline(always)]
fn add_inlined(sums: &mut BlockSums, blocks: &[[u8; BLOCK_BYTES]]) {
    let BlockSums { mut a, mut b } = *sums;
    for block in blocks {
        let (words, _) = block.as_chunks::<8>();
        for lane in 0..LANES {
            a[lane] = a[lane].wrapping_add(u64::from_le_bytes(words[lane]));
            b[lane] = b[lane].wrapping_add(a[lane]);
        }
    }
    *sums = BlockSums { a, b };
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition.
    fn add_scalar(sums: &mut BlockSums, blocks: &[[u8; BLOCK_BYTES]]) {
        for (i, word) in blocks.as_flattened().chunks_exact(8).enumerate() {
            let lane = i % LANES;
            sums.a[lane] = sums.a[lane].wrapping_add(u64::from_le_bytes(word.try_into().unwrap()));
            sums.b[lane] = sums.b[lane].wrapping_add(sums.a[lane]);
        }
    }

    proptest! {
        #[test]
        fn all_instructions_give_the_sums_of_the_definition(
            a in any::<[u64; LANES]>(),
            b in any::<[u64; LANES]>(),
            bytes in proptest::collection::vec(any::<u8>(), 0..40 * BLOCK_BYTES),
        ) {
            let blocks = bytes.as_chunks().0;
            let mut expected = BlockSums { a, b };
            add_scalar(&mut expected, blocks);
            for instructions in Instructions::available() {
                let mut sums = BlockSums { a, b };
                sums.add_with(instructions, blocks);
                prop_assert_eq!(sums, expected, "{:?}", instructions);
            }
            let mut sums = BlockSums { a, b };
            sums.add(blocks);
            prop_assert_eq!(sums, expected);
        }
    }
}
