use super::super::floats;
use super::super::lru_cache::ENTRY_BYTES;
use super::power_iteration::{add_scaled, dot, mix, norm, orthonormalise, random, PowerIteration};
use super::*;
use crate::wire::Shape;
use proptest::prelude::*;

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn encode(
    codec: &mut PowerSvd,
    (dims, layout): (&[usize], Layout),
    values: &[f32],
    context: &CodecContext<'_>,
) -> Result<Vec<u8>, CodecError> {
    let (bytes, mut body) = (bytes(values), Vec::new());
    codec.encode(TensorView { dtype: DType::F32, dims, layout, bytes: &bytes }, context, &mut body).map(|()| body)
}

fn decode(rank: u32, (dims, layout): (&[usize], Layout), body: &[u8]) -> Result<Vec<f32>, CodecError> {
    let meta = TensorMeta { dtype: DType::F32, layout, shape: Shape::new(dims).unwrap(), codec: CodecId::PowerSvd };
    let mut out = vec![0xcc; meta.decoded_bytes() as usize];
    PowerSvd::new(rank).unwrap().decode(&meta, body, &mut out)?;
    Ok(floats(&out).collect())
}

/// Encodes and decodes a tensor of the default slot.
fn send(codec: &mut PowerSvd, dims: &[usize], values: &[f32]) -> Vec<f32> {
    let form = (dims, Layout::Contiguous);
    let body = encode(codec, form, values, &CodecContext::default()).unwrap();
    assert_eq!(body.len(), codec.encoded_bytes(DType::F32, dims));
    decode(codec.rank as u32, form, &body).unwrap()
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>().sqrt()
}

fn length(values: &[f32]) -> f64 {
    distance(values, &vec![0.0; values.len()])
}

/// A matrix whose singular values decrease by a third from one to the next.
fn falling(rows: usize, columns: usize, seed: u64) -> Vec<f32> {
    of_rank(rows, columns, rows.min(columns), seed, 0.66)
}

/// A sum of `rank` products of a column and a row, each smaller by `ratio` than the one before.
fn of_rank(rows: usize, columns: usize, rank: usize, seed: u64, ratio: f64) -> Vec<f32> {
    let mut sums = vec![0.0; rows * columns];
    for at in 0..rank {
        let left: Vec<f64> = random(mix(seed << 32 | at as u64)).take(rows).collect();
        let right: Vec<f64> = random(!mix(seed << 32 | at as u64)).take(columns).collect();
        for (row, scale) in left.iter().enumerate() {
            add_scaled(&mut sums[row * columns..(row + 1) * columns], scale * ratio.powi(at as i32), &right);
        }
    }
    sums.into_iter().map(|value| value as f32).collect()
}

/// The singular values, largest first, by Jacobi rotations of pairs of rows.
fn singular_values(matrix: &[f32], rows: usize) -> Vec<f64> {
    let columns = matrix.len() / rows;
    let mut turned: Vec<Vec<f64>> =
        matrix.chunks_exact(columns).map(|row| row.iter().map(|&value| f64::from(value)).collect()).collect();
    for _ in 0..60 {
        for p in 0..rows {
            for q in p + 1..rows {
                let (upper, lower) = turned.split_at_mut(q);
                let (a, b) = (&mut upper[p], &mut lower[0]);
                let (aa, bb, ab) = (dot(a, a), dot(b, b), dot(a, b));
                if ab.abs() <= 1e-15 * (aa * bb).sqrt() {
                    continue;
                }
                let half = (bb - aa) / (2.0 * ab);
                let tangent = half.signum() / (half.abs() + (1.0 + half * half).sqrt());
                let cosine = 1.0 / (1.0 + tangent * tangent).sqrt();
                for (a, b) in a.iter_mut().zip(b.iter_mut()) {
                    let turn = cosine * tangent;
                    (*a, *b) = (cosine * *a - turn * *b, turn * *a + cosine * *b);
                }
            }
        }
    }
    let mut values: Vec<f64> = turned.iter().map(|row| norm(row)).collect();
    values.sort_by(|a, b| b.total_cmp(a));
    values
}

/// The distance of the best approximation of this rank.
fn least_error(matrix: &[f32], rows: usize, rank: usize) -> f64 {
    singular_values(matrix, rows)[rank..].iter().map(|value| value * value).sum::<f64>().sqrt()
}

#[test]
fn a_matrix_of_the_rank_or_less_is_reproduced() {
    for (rows, columns, of) in [(9, 14, 3), (14, 9, 2), (5, 5, 1), (64, 49, 3), (3, 200, 3)] {
        let values = of_rank(rows, columns, of, 7, 0.5);
        let back = send(&mut PowerSvd::new(3).unwrap(), &[rows, columns], &values);
        let error = distance(&values, &back) / length(&values);
        assert!(error < 3e-7, "{rows} × {columns} of rank {of}: {error}");
    }
    for zero in [vec![0.0; 12], vec![-0.0; 12]] {
        assert_eq!(send(&mut PowerSvd::new(3).unwrap(), &[3, 4], &zero), [0.0; 12]);
    }
}

#[test]
fn a_tensor_is_a_matrix_for_each_sample() {
    let (one, two) = (of_rank(6, 20, 2, 1, 0.9), of_rank(6, 20, 2, 5, 0.9));
    let both = [one, two].concat();
    let mut codec = PowerSvd::new(2).unwrap();
    assert_eq!(codec.encoded_bytes(DType::F32, &[2, 6, 4, 5]), 4 * 2 * 2 * (6 + 20));
    let back = send(&mut codec, &[2, 6, 4, 5], &both);
    assert!(distance(&both, &back) < 1e-6 * length(&both));
    // As one matrix of 12 rows, or with rows of another length, it has a higher rank.
    assert!(distance(&both, &send(&mut PowerSvd::new(2).unwrap(), &[12, 20], &both)) > 0.01 * length(&both));
    assert!(distance(&both, &send(&mut PowerSvd::new(2).unwrap(), &[2, 10, 12], &both)) > 0.01 * length(&both));

    // Channels last: the matrices are transposed in memory, and P and Q are swapped.
    let mut turned = vec![0.0; both.len()];
    for (at, &value) in both.iter().enumerate() {
        let (sample, channel, pixel) = (at / 120, at / 20 % 6, at % 20);
        turned[sample * 120 + pixel * 6 + channel] = value;
    }
    let form = (&[2, 6, 4, 5][..], Layout::ChannelsLast);
    let body = encode(&mut PowerSvd::new(2).unwrap(), form, &turned, &CodecContext::default()).unwrap();
    assert_eq!(body.len(), 4 * 2 * 2 * (6 + 20));
    assert!(distance(&turned, &decode(2, form, &body).unwrap()) < 1e-6 * length(&turned));
}

#[test]
fn a_higher_rank_loses_less() {
    let mut of_least = 0.0;
    for seed in 0..20 {
        let values = falling(17, 23, seed);
        let errors: Vec<f64> = (1..=17)
            .map(|rank| distance(&values, &send(&mut PowerSvd::new(rank).unwrap(), &[17, 23], &values)))
            .collect();
        assert!(errors.is_sorted_by(|a, b| a > b || *b < 1e-6 * length(&values)), "{errors:?}");
        assert!(errors[16] < 1e-6 * length(&values), "{errors:?}");
        let ratios = errors[..10].iter().zip(1..).map(|(error, rank)| error / least_error(&values, 17, rank));
        of_least += ratios.sum::<f64>() / 10.0 / 20.0;
    }
    // Two iterations from random numbers come close to the best approximation.
    assert!((1.0..1.2).contains(&of_least), "{of_least} times the least error");
}

#[test]
fn a_tensor_that_stays_comes_as_close_as_the_rank_allows() {
    for rank in [1, 2, 5] {
        let values = falling(12, 30, u64::from(rank));
        let mut codec = PowerSvd::new(rank).unwrap();
        let errors: Vec<f64> = (0..30).map(|_| distance(&values, &send(&mut codec, &[12, 30], &values))).collect();
        let least = least_error(&values, 12, rank as usize);
        assert!(errors.iter().all(|&error| error > 0.999_999 * least), "{errors:?} against {least}");
        assert!(errors[29] < 1.0001 * least, "{errors:?} against {least}");
        assert!(errors[1] < errors[0] && errors[29] < errors[1], "{errors:?} against {least}");
    }
}

/// Regression: a column of the factor that a tensor of low rank leaves at 0 stayed 0 for all later tensors.
#[test]
fn what_an_earlier_tensor_did_not_need_is_there_for_a_later_one() {
    let mut codec = PowerSvd::new(3).unwrap();
    send(&mut codec, &[8, 11], &of_rank(8, 11, 1, 3, 1.0));
    let values = of_rank(8, 11, 3, 9, 0.8);
    assert!(distance(&values, &send(&mut codec, &[8, 11], &values)) < 1e-6 * length(&values));
    send(&mut codec, &[8, 11], &[0.0; 88]);
    assert!(distance(&values, &send(&mut codec, &[8, 11], &values)) < 1e-6 * length(&values));
}

#[test]
fn a_slot_is_warm_for_its_own_shape_within_the_bound() {
    let values = falling(6, 8, 1);
    let form = (&[6, 8][..], Layout::Contiguous);
    let context = |slot| CodecContext { slot, ..CodecContext::default() };
    let cold = encode(&mut PowerSvd::new(2).unwrap(), form, &values, &context(0)).unwrap();
    let mut codec = PowerSvd::new(2).unwrap();
    codec.starts = LruCache::new(2 * (4 * 2 * 8 + ENTRY_BYTES));
    let mut is_cold = |slot| encode(&mut codec, form, &values, &context(slot)).unwrap() == cold;
    let expected = [(0, true), (1, true), (0, false), (2, true), (0, false), (1, true), (2, true)];
    for (at, (slot, cold)) in expected.into_iter().enumerate() {
        assert_eq!(is_cold(slot), cold, "{at}");
    }
    let other = falling(8, 6, 1);
    encode(&mut codec, (&[8, 6], Layout::Contiguous), &other, &context(2)).unwrap();
    assert_eq!(encode(&mut codec, form, &values, &context(2)).unwrap(), cold);
    codec.reset();
    assert_eq!(encode(&mut codec, form, &values, &context(2)).unwrap(), cold);
}

#[test]
fn a_warm_tensor_takes_one_iteration() {
    let (values, form) = (falling(6, 8, 1), (&[6, 8][..], Layout::Contiguous));
    let mut codec = PowerSvd::new(2).unwrap();
    encode(&mut codec, form, &values, &CodecContext::default()).unwrap();
    let mut iteration = PowerIteration::default();
    iteration.start(Some(&codec.starts.get(&0).unwrap().right), 0, 8, 2);
    iteration.iterate(&bytes(&values), Matrices { count: 1, rows: 6, columns: 8 });
    let factors = iteration.left.iter().chain(&iteration.right).map(|&value| value as f32);
    let expected: Vec<u8> = factors.flat_map(f32::to_le_bytes).collect();
    assert_eq!(encode(&mut codec, form, &values, &CodecContext::default()).unwrap(), expected);
}

#[test]
fn the_wrong_shape_is_refused_and_the_wrong_rank_is_an_error() {
    let mut codec = PowerSvd::new(3).unwrap();
    let mut refused = |dims: &[usize]| {
        let values = vec![1.0; dims.iter().product()];
        encode(&mut codec, (dims, Layout::Contiguous), &values, &CodecContext::default()).unwrap_err()
    };
    for dims in [&[][..], &[7]] {
        assert!(refused(dims).refuses_tensor(), "{dims:?}");
    }
    let error = refused(&[2, 4, 1, 2]);
    assert!(!error.refuses_tensor());
    assert_eq!(
        error.to_string(),
        "expected a rank of at most 2 for matrices of a tensor of [2, 4, 1, 2], got svd:3: use svd:2 or less on this \
         link, or another codec"
    );
    assert_eq!(
        decode(3, (&[4, 2], Layout::Contiguous), &[]),
        Err(CodecError::Rank { rank: 3, most: 2, dims: vec![4, 2] })
    );
    // A last batch with few rows goes raw; too few columns mean that the rank is wrong for every batch.
    assert!(refused(&[2, 4]).refuses_tensor() && !refused(&[4, 2]).refuses_tensor());
    assert!(matches!(decode(3, (&[7], Layout::Contiguous), &[]), Err(CodecError::Shape { .. })));
    // A tensor without elements is accepted with any rank.
    assert_eq!(decode(3, (&[2, 0], Layout::Contiguous), &[]), Ok(vec![]));
}

#[test]
fn what_cannot_be_a_number_is_refused_at_both_ends() {
    // All values are the largest finite number: the norm of a row is four times as large.
    let form = (&[4, 4][..], Layout::Contiguous);
    let error = encode(&mut PowerSvd::new(1).unwrap(), form, &[f32::MAX; 16], &CodecContext::default()).unwrap_err();
    assert_eq!(error, CodecError::Overflow { codec: CodecId::PowerSvd, at: 0 });
    let large = [f32::MAX / 4.1; 16];
    let body = encode(&mut PowerSvd::new(1).unwrap(), form, &large, &CodecContext::default()).unwrap();
    assert!(decode(1, form, &body).unwrap().iter().all(|value| value.is_finite()));
    let value = |at| Err(CodecError::Value { codec: CodecId::PowerSvd, at });
    for (place, with, at) in [(0, f32::NAN, 0), (3, f32::INFINITY, 12), (6, f32::NEG_INFINITY, 2), (2, 1e10, 8)] {
        let mut body = body.clone();
        body[4 * place..4 * place + 4].copy_from_slice(&with.to_le_bytes());
        assert_eq!(decode(1, form, &body), value(at), "{with} at {place}");
    }
}

proptest! {
    #[test]
    fn columns_are_orthonormal_whatever_they_were(
        values in prop::collection::vec(prop_oneof![2 => -1.0f64..1.0, 1 => Just(0.0), 1 => Just(1.0), 1 => -1e-30..1e-30f64], 60),
        rank in 1usize..=6,
        doubled in 0usize..6,
        nearly in prop::sample::select(&[0.0, 1e-9, 1e-5, 1.0][..]),
    ) {
        let mut columns = values[..10 * rank].to_vec();
        // Almost equal to the first: what remains is smaller than the rounding error of one projection.
        let first = columns[..10].to_vec();
        let near = &mut columns[10 * (doubled % rank)..][..10];
        near.iter_mut().zip(&first).for_each(|(value, first)| *value = first + nearly * *value);
        orthonormalise(&mut columns, 10);
        for (at, a) in columns.chunks_exact(10).enumerate() {
            for (other, b) in columns.chunks_exact(10).enumerate() {
                let expected = if at == other { 1.0 } else { 0.0 };
                prop_assert!((dot(a, b) - expected).abs() < 1e-12, "{} {}: {}", at, other, dot(a, b));
            }
        }
    }
}
