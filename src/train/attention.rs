//! Attention of chains: step 0's keys of the document, causally, and each chain's own keys of later steps.
//!
//! Queries, keys and values are head-major inside each document, so that one (document, key head) is one contiguous piece
//! that one task owns. Scores live in a tile per thread and are computed again on the way back: memory does not grow
//! with the square of a document's length.

use std::sync::Mutex;

use rayon::prelude::*;

use crate::compute::{
    Real, RopeTable, Threads, View, add_scaled, dot, exp_in_place, max, product, vectorised,
};

/// Query rows of one tile.
const TILE: usize = 64;

/// Where a document lies in the packed batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Span {
    /// Number of the document in the batch, as given.
    pub document: usize,
    /// First packed row.
    pub row_start: usize,
    /// Rows that are seen as keys.
    pub rows: usize,
    /// First packed chain.
    pub chain_start: usize,
    pub chains: usize,
    /// Row of the document where the first chain starts.
    pub first_row: usize,
}

/// Head counts and sizes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub query: usize,
    pub key: usize,
    pub size: usize,
}

impl Heads {
    fn group(&self) -> usize {
        self.query / self.key
    }
}

/// Scratch of each thread.
pub(super) struct Tiles<T> {
    tiles: Vec<Mutex<Vec<T>>>,
}

impl<T: Real> Tiles<T> {
    pub fn new() -> Self {
        Self { tiles: (0..=rayon::current_num_threads()).map(|_| Mutex::new(Vec::new())).collect() }
    }

    /// Runs `work` with `length` elements of this thread's scratch.
    fn with<R>(&self, length: usize, work: impl FnOnce(&mut [T]) -> R) -> R {
        let index = rayon::current_thread_index().unwrap_or(usize::MAX).min(self.tiles.len() - 1);
        let mut tile = self.tiles[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if tile.len() < length {
            tile.resize(length, T::ZERO);
        }
        work(&mut tile[..length])
    }
}

/// How vectors are turned on the way between the layouts.
#[derive(Clone, Copy)]
pub(super) enum Turn<'a, T> {
    /// As they are.
    None,
    /// By RoPE, `offset` positions after the row's own.
    By { table: &'a RopeTable<T>, offset: usize },
}

/// What the rows of a packed matrix are: all rows of the documents, or their chains.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Rows {
    All,
    Chains,
}

impl Rows {
    fn of(self, span: &Span) -> (usize, usize, usize) {
        match self {
            Rows::All => (span.row_start, span.rows, 0),
            Rows::Chains => (span.chain_start, span.chains, span.first_row),
        }
    }
}

/// Cuts a slice into pieces of the given lengths.
fn pieces<T>(mut whole: &mut [T], lengths: impl Iterator<Item = usize>) -> Vec<&mut [T]> {
    let mut list = Vec::new();
    for length in lengths {
        let (piece, rest) = whole.split_at_mut(length);
        list.push(piece);
        whole = rest;
    }
    list
}

/// Row-major [n, heads * D] to head-major per document. `slots` > 1 leaves room for that many steps in each
/// (document, head) piece and fills number `slot`.
pub(super) fn to_heads<T: Real>(
    source: &[T],
    target: &mut [T],
    spans: &[Span],
    (heads, size): (usize, usize),
    rows: Rows,
    turn: Turn<T>,
    (slot, slots): (usize, usize),
) {
    let lengths = spans.iter().flat_map(|span| std::iter::repeat_n(rows.of(span).1 * size * slots, heads));
    let targets = pieces(target, lengths);
    targets.into_par_iter().enumerate().for_each(|(i, piece)| {
        let (start, count, first) = rows.of(&spans[i / heads]);
        let head = i % heads;
        let piece = &mut piece[slot * count * size..(slot + 1) * count * size];
        vectorised!({
            for row in 0..count {
                let from = &source[((start + row) * heads + head) * size..][..size];
                let to = &mut piece[row * size..(row + 1) * size];
                match turn {
                    Turn::None => to.copy_from_slice(from),
                    Turn::By { table, offset } => table.turn(to, from, first + row + offset),
                }
            }
        });
    });
}

/// The way back of [`to_heads`], with RoPE undone: for outputs and for gradients.
pub(super) fn from_heads<T: Real>(
    source: &[T],
    target: &mut [T],
    spans: &[Span],
    (heads, size): (usize, usize),
    rows: Rows,
    turn: Turn<T>,
    (slot, slots): (usize, usize),
) {
    let width = heads * size;
    for span in spans {
        let (start, count, first) = rows.of(span);
        let piece = &source[start * width * slots..(start + count) * width * slots];
        target[start * width..(start + count) * width]
            .par_chunks_mut(width)
            .enumerate()
            .with_min_len(16)
            .for_each(|(row, to)| {
                vectorised!({
                    for head in 0..heads {
                        let from = &piece[((head * slots + slot) * count + row) * size..][..size];
                        let to = &mut to[head * size..(head + 1) * size];
                        match turn {
                            Turn::None => to.copy_from_slice(from),
                            Turn::By { table, offset } => table.turn_back(to, from, first + row + offset),
                        }
                    }
                });
            });
    }
}

/// Keys and values: of step 0 for all rows, and of the chains' later steps.
#[derive(Clone, Copy)]
pub(super) struct KeyValues<'a, T> {
    /// Per (document, key head) [rows, D].
    pub keys: &'a [T],
    pub values: &'a [T],
    /// Per (document, key head) [slots, chains, D]; slot i is step i + 1.
    pub own_keys: &'a [T],
    pub own_values: &'a [T],
    pub slots: usize,
    /// Steps 1..=`step` are seen besides step 0.
    pub step: usize,
}

/// Gradients of [`KeyValues`]; all are added to.
pub(super) struct KeyValueGradients<'a, T> {
    pub keys: &'a mut [T],
    pub values: &'a mut [T],
    pub own_keys: &'a mut [T],
    pub own_values: &'a mut [T],
}

/// One (document, key head): offsets of its pieces.
struct Piece {
    span: Span,
    keys: usize,
    own: usize,
    queries: usize,
}

fn list_pieces(spans: &[Span], heads: Heads, slots: usize) -> Vec<Piece> {
    let mut list = Vec::with_capacity(spans.len() * heads.key);
    for span in spans {
        for head in 0..heads.key {
            list.push(Piece {
                span: *span,
                keys: (span.row_start * heads.key + head * span.rows) * heads.size,
                own: (span.chain_start * heads.key + head * span.chains) * heads.size * slots,
                queries: (span.chain_start * heads.query + head * heads.group() * span.chains) * heads.size,
            });
        }
    }
    list
}

/// `queries` and `output` are head-major per document [heads, chains, D]; `log_sums` [heads, chains] is kept for the way
/// back.
pub(super) fn forward<T: Real>(
    queries: &[T],
    seen: KeyValues<T>,
    (output, log_sums): (&mut [T], &mut [T]),
    spans: &[Span],
    heads: Heads,
    tiles: &Tiles<T>,
) {
    let (size, step) = (heads.size, seen.step);
    let scale = T::from_f64(1.0 / (size as f64).sqrt());
    let list = list_pieces(spans, heads, seen.slots);
    let outputs = pieces(output, list.iter().map(|piece| piece.span.chains * heads.group() * size));
    let sums = pieces(log_sums, list.iter().map(|piece| piece.span.chains * heads.group()));
    list.par_iter().zip(outputs).zip(sums).for_each(|((piece, output), sums)| {
        let Span { rows, chains, first_row, .. } = piece.span;
        let keys = &seen.keys[piece.keys..piece.keys + rows * size];
        let values = &seen.values[piece.keys..piece.keys + rows * size];
        for head in 0..heads.group() {
            for start in (0..chains).step_by(TILE) {
                let count = TILE.min(chains - start);
                let limit = first_row + start + count;
                let at = (head * chains + start) * size;
                let query = &queries[piece.queries + at..piece.queries + at + count * size];
                let output = &mut output[at..at + count * size];
                let sums = &mut sums[head * chains + start..head * chains + start + count];
                tiles.with(count * (limit + step), |scratch| {
                    let (scores, own) = scratch.split_at_mut(count * limit);
                    let left = View::new(query, count, size);
                    product(
                        scores,
                        limit,
                        left,
                        View::new(keys, limit, size).transposed(),
                        false,
                        Threads::One,
                    );
                    vectorised!({
                        for row in 0..count {
                            let visible = first_row + start + row + 1;
                            let (row_scores, hidden) =
                                scores[row * limit..(row + 1) * limit].split_at_mut(visible);
                            let own = &mut own[row * step..(row + 1) * step];
                            let query = &query[row * size..(row + 1) * size];
                            for (slot, score) in own.iter_mut().enumerate() {
                                let from = piece.own + (slot * chains + start + row) * size;
                                *score = dot(query, &seen.own_keys[from..from + size]);
                            }
                            let top = max(row_scores).largest(max(own)) * scale;
                            let sum = exp_in_place(row_scores, scale, top) + exp_in_place(own, scale, top);
                            hidden.fill(T::ZERO);
                            let inverse = T::ONE / sum;
                            row_scores.iter_mut().for_each(|score| *score *= inverse);
                            own.iter_mut().for_each(|score| *score *= inverse);
                            sums[row] = top + sum.ln();
                        }
                    });
                    let left = View::new(scores, count, limit);
                    product(output, size, left, View::new(values, limit, size), false, Threads::One);
                    vectorised!({
                        for row in 0..count {
                            for slot in 0..step {
                                let from = piece.own + (slot * chains + start + row) * size;
                                let value = &seen.own_values[from..from + size];
                                add_scaled(
                                    &mut output[row * size..(row + 1) * size],
                                    own[row * step + slot],
                                    value,
                                );
                            }
                        }
                    });
                });
            }
        }
    });
}

/// The gradient of [`forward`]: `query_gradient` is set, those of keys and values are added to.
pub(super) fn backward<T: Real>(
    (queries, query_gradient): (&[T], &mut [T]),
    seen: KeyValues<T>,
    gradients: KeyValueGradients<T>,
    (output, output_gradient, log_sums): (&[T], &[T], &[T]),
    spans: &[Span],
    heads: Heads,
    tiles: &Tiles<T>,
) {
    let (size, step) = (heads.size, seen.step);
    let scale = T::from_f64(1.0 / (size as f64).sqrt());
    let list = list_pieces(spans, heads, seen.slots);
    let query_gradients =
        pieces(query_gradient, list.iter().map(|piece| piece.span.chains * heads.group() * size));
    let key_gradients = pieces(gradients.keys, list.iter().map(|piece| piece.span.rows * size));
    let value_gradients = pieces(gradients.values, list.iter().map(|piece| piece.span.rows * size));
    let own_length = |piece: &Piece| piece.span.chains * size * seen.slots;
    let own_key_gradients = pieces(gradients.own_keys, list.iter().map(own_length));
    let own_value_gradients = pieces(gradients.own_values, list.iter().map(own_length));
    let tasks = list
        .par_iter()
        .zip(query_gradients)
        .zip(key_gradients.into_par_iter().zip(value_gradients))
        .zip(own_key_gradients.into_par_iter().zip(own_value_gradients));
    tasks.for_each(|(((piece, query_gradient), (key_gradient, value_gradient)), (own_keys, own_values))| {
        let Span { rows, chains, first_row, .. } = piece.span;
        let keys = &seen.keys[piece.keys..piece.keys + rows * size];
        let values = &seen.values[piece.keys..piece.keys + rows * size];
        for head in 0..heads.group() {
            for start in (0..chains).step_by(TILE) {
                let count = TILE.min(chains - start);
                let limit = first_row + start + count;
                let at = (head * chains + start) * size;
                let packed = piece.queries + at..piece.queries + at + count * size;
                let (query, gradient, output) =
                    (&queries[packed.clone()], &output_gradient[packed.clone()], &output[packed.clone()]);
                let sums = &log_sums[packed.start / size..packed.start / size + count];
                let query_gradient = &mut query_gradient[at..at + count * size];
                tiles.with(count * (2 * limit + 2 * step), |scratch| {
                    let (weights, rest) = scratch.split_at_mut(count * limit);
                    let (slopes, own) = rest.split_at_mut(count * limit);
                    let (own_weights, own_slopes) = own.split_at_mut(count * step);
                    let query_view = View::new(query, count, size);
                    let gradient_view = View::new(gradient, count, size);
                    let key_view = View::new(keys, limit, size);
                    let value_view = View::new(values, limit, size);
                    product(weights, limit, query_view, key_view.transposed(), false, Threads::One);
                    product(slopes, limit, gradient_view, value_view.transposed(), false, Threads::One);
                    vectorised!({
                        for row in 0..count {
                            let visible = first_row + start + row + 1;
                            let weights = &mut weights[row * limit..(row + 1) * limit];
                            let slopes = &mut slopes[row * limit..(row + 1) * limit];
                            exp_in_place(&mut weights[..visible], scale, sums[row]);
                            weights[visible..].fill(T::ZERO);
                            let range = row * size..(row + 1) * size;
                            let mean = dot(&gradient[range.clone()], &output[range.clone()]);
                            for i in 0..limit {
                                slopes[i] = weights[i] * (slopes[i] - mean) * scale;
                            }
                            let (query, gradient) = (&query[range.clone()], &gradient[range]);
                            for slot in 0..step {
                                let local = (slot * chains + start + row) * size;
                                let key = &seen.own_keys[piece.own + local..piece.own + local + size];
                                let value = &seen.own_values[piece.own + local..piece.own + local + size];
                                let weight = (dot(query, key) * scale - sums[row]).exp();
                                let slope = weight * (dot(gradient, value) - mean) * scale;
                                own_weights[row * step + slot] = weight;
                                own_slopes[row * step + slot] = slope;
                                add_scaled(&mut own_keys[local..local + size], slope, query);
                                add_scaled(&mut own_values[local..local + size], weight, gradient);
                            }
                        }
                    });
                    let weight_view = View::new(weights, count, limit);
                    let slope_view = View::new(slopes, count, limit);
                    product(
                        value_gradient,
                        size,
                        weight_view.transposed(),
                        gradient_view,
                        true,
                        Threads::One,
                    );
                    product(key_gradient, size, slope_view.transposed(), query_view, true, Threads::One);
                    product(query_gradient, size, slope_view, key_view, false, Threads::One);
                    vectorised!({
                        for row in 0..count {
                            for slot in 0..step {
                                let from = piece.own + (slot * chains + start + row) * size;
                                let key = &seen.own_keys[from..from + size];
                                let target = &mut query_gradient[row * size..(row + 1) * size];
                                add_scaled(target, own_slopes[row * step + slot], key);
                            }
                        }
                    });
                });
            }
        }
    });
}
