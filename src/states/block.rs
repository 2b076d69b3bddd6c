//! Which rows are the same rows.
//!
//! A row of states depends on its token and on those before it, and on no other. So states are kept in blocks of
//! [`BLOCK_ROWS`] rows under a key that commits to every token up to the block's end, chained as the keys of vLLM's own
//! prefix cache are: requests that begin alike share the blocks of what they have in common. The last block of a sample
//! may be shorter; it is shared by samples of the same tokens alone.
//!
//! The first link of the chain commits to all else that decides what a row holds: layers, hidden size, how values are
//! stored, and the salt that the plugin gives to requests whose states do not follow from their ids alone (LoRA, images).

use std::fmt;

use sha2::{Digest, Sha256};

use super::StateDtype;

/// Rows of a full block: vLLM's smallest block, so that a prefix hit ends at the end of a block.
pub(crate) const BLOCK_ROWS: usize = 16;

pub(crate) const KEY_BYTES: usize = 16;

/// The first half of a SHA-256: no two prefixes of one deployment meet by chance.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BlockKey(pub(crate) [u8; KEY_BYTES]);

impl fmt::Debug for BlockKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&crate::store::hex(&self.0))
    }
}

impl BlockKey {
    fn of(digest: Sha256) -> Self {
        let mut key = [0; KEY_BYTES];
        key.copy_from_slice(&digest.finalize()[..KEY_BYTES]);
        Self(key)
    }
}

/// What the rows of a sample depend on besides its tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout<'a> {
    pub layer_ids: &'a [u32],
    /// H
    pub hidden: usize,
    /// As stored.
    pub dtype: StateDtype,
    pub salt: &'a str,
}

/// How many blocks hold so many rows.
pub(crate) fn block_count(rows: usize) -> usize {
    rows.div_ceil(BLOCK_ROWS)
}

/// The keys of the blocks of `tokens` [T], those that have a row, in order.
pub(crate) fn block_keys(layout: Layout<'_>, tokens: &[u32]) -> Vec<BlockKey> {
    let mut root = Sha256::new();
    root.update(b"draftsmith block 1");
    root.update([layout.dtype.code()]);
    root.update((layout.hidden as u64).to_le_bytes());
    root.update((layout.layer_ids.len() as u64).to_le_bytes());
    for id in layout.layer_ids {
        root.update(id.to_le_bytes());
    }
    root.update(layout.salt.as_bytes());
    let mut key = BlockKey::of(root);
    let mut keys = Vec::with_capacity(block_count(tokens.len()));
    for block in tokens.chunks(BLOCK_ROWS) {
        let mut digest = Sha256::new();
        digest.update(key.0);
        for token in block {
            digest.update(token.to_le_bytes());
        }
        key = BlockKey::of(digest);
        keys.push(key);
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout<'_> =
        Layout { layer_ids: &[2, 15, 27, 30], hidden: 8, dtype: StateDtype::Bf16, salt: "" };

    #[test]
    fn what_begins_alike_shares_its_first_blocks() {
        let one: Vec<u32> = (0..40).collect();
        let mut other = one.clone();
        other[33] = 7;
        let (one, other) = (block_keys(LAYOUT, &one), block_keys(LAYOUT, &other));
        assert_eq!((one.len(), other.len()), (3, 3));
        assert_eq!(one[..2], other[..2]);
        assert_ne!(one[2], other[2]);
    }

    #[test]
    fn a_block_is_known_by_all_tokens_before_it() {
        let one: Vec<u32> = (0..32).collect();
        let mut other = one.clone();
        other[0] = 7;
        assert_ne!(block_keys(LAYOUT, &one)[1], block_keys(LAYOUT, &other)[1]);
        assert_ne!(
            block_keys(LAYOUT, &one[..31])[1],
            block_keys(LAYOUT, &one)[1],
            "a short block is another block"
        );
    }

    #[test]
    fn states_of_another_kind_are_other_blocks() {
        let tokens = [1, 2, 3];
        let plain = block_keys(LAYOUT, &tokens);
        for other in [
            Layout { layer_ids: &[2, 15, 28, 30], ..LAYOUT },
            Layout { hidden: 9, ..LAYOUT },
            Layout { dtype: StateDtype::F32, ..LAYOUT },
            Layout { salt: "adapter", ..LAYOUT },
        ] {
            assert_ne!(block_keys(other, &tokens), plain, "{other:?}");
        }
    }
}
