//! Where the states of recorded ids come from.

use crate::states::{OutcomeStatus, StockSample, TransferFile};

/// Something that gives the states of token ids.
pub(super) trait StateSource: Send + Sync + 'static {
    /// The states of one sample, a row for each id of [`StockSample::prefill`]. `record_id` names it to people.
    fn states(
        &self,
        sample: StockSample,
        record_id: &str,
    ) -> impl Future<Output = Result<TransferFile, SourceError>> + Send;
}

/// Why a source gave no states.
pub(super) enum SourceError {
    /// It is the sample's own matter, and was logged: the next one may do.
    Sample(OutcomeStatus),
    /// No other sample would fare better. Says why.
    Source(String),
}
