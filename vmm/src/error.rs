//! One error type for all that can go wrong while a microVM is set up: the step,
//! what it was done to, and what the reader can do about it.

use std::error::Error;

use warren_vmm_api::ErrorReply;

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}")]
pub struct VmmError {
    step: String,
    advice: &'static str,
    #[source]
    source: Box<dyn Error + Send + Sync>,
}

impl VmmError {
    /// A failure of `step`, with what the reader can do (may be empty).
    pub fn new(
        step: impl Into<String>,
        advice: &'static str,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { step: step.into(), advice, source: source.into() }
    }

    /// What the reader can do; empty when there is nothing to say.
    #[must_use]
    pub fn advice(&self) -> &'static str {
        self.advice
    }

    /// The causes below the step, outermost first, as one line.
    #[must_use]
    pub fn causes(&self) -> String {
        let mut text = String::new();
        let mut cause: Option<&dyn Error> = Some(self.source.as_ref());
        while let Some(error) = cause {
            if !text.is_empty() {
                text.push_str(": ");
            }
            text.push_str(&error.to_string());
            cause = error.source();
        }
        text
    }

    /// As a peer on a control socket sees it.
    #[must_use]
    pub fn reply(&self) -> ErrorReply {
        ErrorReply {
            step: self.step.clone(),
            message: self.causes(),
            advice: self.advice.to_owned(),
        }
    }
}

/// Names the step in which a result was got.
pub trait Step<T> {
    /// Turns an error into one that names the step.
    ///
    /// # Errors
    /// The error of `self`, wrapped.
    fn step(self, step: impl FnOnce() -> String, advice: &'static str) -> Result<T, VmmError>;
}

impl<T, E: Into<Box<dyn Error + Send + Sync>>> Step<T> for Result<T, E> {
    fn step(self, step: impl FnOnce() -> String, advice: &'static str) -> Result<T, VmmError> {
        self.map_err(|source| VmmError::new(step(), advice, source))
    }
}
