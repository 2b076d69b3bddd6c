//! What every sample passes before it is stored, whichever way its file came.

use super::store::now_milliseconds;
use super::transfer::{TransferError, TransferFile};
use super::{NewSample, SampleHeader, StateStore, StatesError, values};

/// Why a sample was stored or not; also the reasons by which failures are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OutcomeStatus {
    Stored,
    /// No file came in time.
    #[default]
    Missing,
    /// No request came in time.
    Unmatched,
    /// The request wants no states.
    NotWanted,
    /// The request has no such choice.
    UnexpectedChoice,
    /// vLLM refused to compute the states again.
    Refused,
    /// Not published by the plugin, or not for this request, as the name shows.
    BadName,
    Unreadable,
    Format,
    Checksum,
    /// Rows, ids or layers do not fit each other, or the ids inside and outside the file differ.
    Shape,
    /// Not the layers of this deployment.
    Layers,
    /// Not the hidden size of this deployment.
    HiddenSize,
    /// An id is not in the vocabulary.
    Vocabulary,
    /// The ids do not decode to what was recorded.
    Text,
    NotFinite,
    Duplicate,
    TooLarge,
    /// Too many files in a row were wrong, so none is taken in any more.
    SwitchedOff,
    /// All of its rows come before one that is to be had nowhere.
    Incomplete,
    /// The store could not be written.
    StoreError,
}

impl OutcomeStatus {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::Missing => "missing",
            Self::Unmatched => "unmatched",
            Self::NotWanted => "not_wanted",
            Self::UnexpectedChoice => "unexpected_choice",
            Self::Refused => "refused",
            Self::BadName => "bad_name",
            Self::Unreadable => "unreadable",
            Self::Format => "format",
            Self::Checksum => "checksum",
            Self::Shape => "shape",
            Self::Layers => "layers",
            Self::HiddenSize => "hidden_size",
            Self::Vocabulary => "vocabulary",
            Self::Text => "text",
            Self::NotFinite => "not_finite",
            Self::Duplicate => "duplicate",
            Self::TooLarge => "too_large",
            Self::SwitchedOff => "switched_off",
            Self::Incomplete => "incomplete",
            Self::StoreError => "store_error",
        }
    }
}

impl OutcomeStatus {
    /// Whether it says that whoever wrote the file is at fault. Text is no such sign: an answer that a stop string ended
    /// has other ids than its text.
    pub(super) fn is_fault_of_the_source(self) -> bool {
        matches!(
            self,
            Self::Unreadable
                | Self::Format
                | Self::Checksum
                | Self::Shape
                | Self::Layers
                | Self::HiddenSize
                | Self::Vocabulary
                | Self::NotFinite
        )
    }
}

impl From<&TransferError> for OutcomeStatus {
    fn from(error: &TransferError) -> Self {
        match error {
            TransferError::Unreadable(_) => Self::Unreadable,
            TransferError::Format(_) => Self::Format,
            TransferError::Checksum { .. } => Self::Checksum,
            TransferError::Shape(_) => Self::Shape,
        }
    }
}

/// What the samples of one deployment have in common.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expected {
    /// The layer ids that each file must have, in this order; None: any, but the same ones in all files.
    pub layer_ids: Option<Vec<u32>>,
    /// H; None: as the first file has it.
    pub hidden_size: Option<usize>,
    /// V; ids must be below. None: not checked.
    pub vocab_size: Option<usize>,
}

impl Expected {
    /// Whether all ids are in the vocabulary.
    pub(super) fn check_ids(&self, token_ids: &[u32]) -> Result<(), OutcomeStatus> {
        if let Some(vocab_size) = self.vocab_size
            && token_ids.iter().any(|id| *id as usize >= vocab_size)
        {
            return Err(OutcomeStatus::Vocabulary);
        }
        Ok(())
    }

    pub(super) fn check_states(&mut self, file: &TransferFile) -> Result<(), OutcomeStatus> {
        if self.layer_ids.as_ref().is_some_and(|wanted| *wanted != file.layer_ids) {
            return Err(OutcomeStatus::Layers);
        }
        if self.hidden_size.is_some_and(|wanted| wanted != file.hidden) {
            return Err(OutcomeStatus::HiddenSize);
        }
        if !values::all_finite(file.dtype, &file.states) {
            return Err(OutcomeStatus::NotFinite);
        }
        // Where nothing was configured, the first good file decides.
        self.layer_ids.get_or_insert_with(|| file.layer_ids.clone());
        self.hidden_size.get_or_insert(file.hidden);
        Ok(())
    }
}

/// Which choice of which request a sample belongs to, and on which side of the split it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleKey<'a> {
    pub request_id: &'a str,
    pub choice_index: u32,
    pub conversation_id: &'a str,
    /// `live`, `replay` or `import`.
    pub source: &'a str,
    pub held_out: bool,
}

/// What came of a file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Accepted {
    pub status: OutcomeStatus,
    /// Rows that vLLM believes to be here, and that are not.
    pub missing_rows: usize,
}

impl From<OutcomeStatus> for Accepted {
    fn from(status: OutcomeStatus) -> Self {
        Self { status, missing_rows: 0 }
    }
}

/// Checks the states of a file whose ids are good, and stores them.
pub(super) fn check_and_store(
    store: &mut StateStore,
    expected: &mut Expected,
    key: SampleKey<'_>,
    file: &TransferFile,
) -> Accepted {
    if let Err(status) = expected.check_states(file) {
        return status.into();
    }
    let header = SampleHeader {
        request_id: key.request_id.to_owned(),
        choice_index: key.choice_index,
        conversation_id: key.conversation_id.to_owned(),
        source: key.source.to_owned(),
        held_out: key.held_out,
        prompt_length: file.prompt_length,
        rows: file.rows,
        missing_rows: 0,
        layers: file.layers,
        hidden: file.hidden,
        dtype: file.dtype,
        layer_ids: file.layer_ids.clone(),
        prefix_salt: file.prefix_salt.clone(),
        head_digest: file.head_digest.clone(),
        drafting: file.drafting,
        captured_at: now_milliseconds(),
    };
    let sample = NewSample {
        header: &header,
        token_ids: &file.token_ids,
        first_row: file.first_row,
        states: &file.states,
    };
    match store.append(sample) {
        Ok(appended) => {
            count_rows("new", appended.new_rows);
            count_rows("shared", appended.shared_rows);
            count_rows("missing", appended.missing_rows);
            let tokens = file.token_ids.len() - file.prompt_length;
            metrics::counter!("draftsmith_states_output_tokens_total").increment(tokens as u64);
            Accepted { status: OutcomeStatus::Stored, missing_rows: appended.missing_rows }
        }
        Err(StatesError::Duplicate { .. }) => OutcomeStatus::Duplicate.into(),
        Err(StatesError::TooLarge { .. }) => OutcomeStatus::TooLarge.into(),
        Err(StatesError::NoCompleteRows { missing, .. }) => {
            Accepted { status: OutcomeStatus::Incomplete, missing_rows: missing }
        }
        Err(error) => {
            tracing::warn!("{error}");
            OutcomeStatus::StoreError.into()
        }
    }
}

fn count_rows(kind: &'static str, rows: usize) {
    metrics::counter!("draftsmith_states_rows_total", "kind" => kind).increment(rows as u64);
}
