//! Messages of the process service, in protobuf's JSON mapping.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

/// A message without fields.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct Empty {}

#[derive(Debug, Default, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct ProcessConfig {
    pub cmd: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub envs: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(default)]
pub struct Size {
    pub cols: u32,
    pub rows: u32,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Pty {
    pub size: Option<Size>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StartRequest {
    pub process: ProcessConfig,
    pub pty: Option<Pty>,
    pub tag: Option<String>,
    /// Absent means yes: that is what clients older than the field expect.
    pub stdin: Option<bool>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Selector {
    Pid(i32),
    Tag(String),
    #[default]
    #[serde(skip)]
    Nothing,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ConnectRequest {
    pub process: Selector,
    pub replay: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct UpdateRequest {
    pub process: Selector,
    pub pty: Option<Pty>,
}

#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Input {
    Stdin(#[serde(deserialize_with = "base64_bytes")] Vec<u8>),
    Pty(#[serde(deserialize_with = "base64_bytes")] Vec<u8>),
    #[default]
    #[serde(skip)]
    Nothing,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SendInputRequest {
    pub process: Selector,
    pub input: Input,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StreamInputRequest {
    Start(StreamInputStart),
    Data(StreamInputData),
    Keepalive(Empty),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamInputStart {
    pub process: Selector,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamInputData {
    pub input: Input,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum SignalName {
    #[default]
    Unspecified,
    Terminate,
    Kill,
}

impl<'de> Deserialize<'de> for SignalName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Enums come as names, and may come as numbers.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Wire {
            Name(String),
            Number(i32),
        }
        match Wire::deserialize(deserializer)? {
            Wire::Name(name) => match name.as_str() {
                "SIGNAL_UNSPECIFIED" => Ok(SignalName::Unspecified),
                "SIGNAL_SIGTERM" => Ok(SignalName::Terminate),
                "SIGNAL_SIGKILL" => Ok(SignalName::Kill),
                other => Err(D::Error::custom(format!("unknown signal {other:?}"))),
            },
            Wire::Number(0) => Ok(SignalName::Unspecified),
            Wire::Number(15) => Ok(SignalName::Terminate),
            Wire::Number(9) => Ok(SignalName::Kill),
            Wire::Number(other) => Err(D::Error::custom(format!("unknown signal {other}"))),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SendSignalRequest {
    pub process: Selector,
    pub signal: SignalName,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct CloseStdinRequest {
    pub process: Selector,
}

#[derive(Debug, Serialize)]
pub struct ProcessInfo {
    pub config: ProcessConfig,
    pub pid: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct ListResponse {
    pub processes: Vec<ProcessInfo>,
}

/// Protobuf's JSON takes both alphabets, padded or not.
fn base64_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
    if let Ok(bytes) = STANDARD.decode(text.as_bytes()) {
        return Ok(bytes);
    }
    let mut text = text.trim_end_matches('=').replace('+', "-").replace('/', "_");
    while text.len() % 4 != 0 {
        text.push('=');
    }
    URL_SAFE.decode(text).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_bytes_take_every_base64() {
        for text in ["/+8=", "/+8", "_-8", "_-8="] {
            let json = format!(r#"{{"process":{{"pid":5}},"input":{{"stdin":"{text}"}}}}"#);
            let request: SendInputRequest = serde_json::from_str(&json).unwrap();
            assert_eq!(request.process, Selector::Pid(5));
            assert_eq!(request.input, Input::Stdin(vec![0xff, 0xef]));
        }
    }

    #[test]
    fn start_request_defaults() {
        let request: StartRequest =
            serde_json::from_str(r#"{"process":{"cmd":"ls"},"unknown":1}"#).unwrap();
        assert_eq!(request.process.cmd, "ls");
        assert_eq!(request.stdin, None);
        assert!(request.pty.is_none());
    }

    #[test]
    fn signal_name_or_number() {
        let by_name: SendSignalRequest =
            serde_json::from_str(r#"{"process":{"tag":"t"},"signal":"SIGNAL_SIGKILL"}"#).unwrap();
        assert_eq!(by_name.signal, SignalName::Kill);
        let by_number: SendSignalRequest =
            serde_json::from_str(r#"{"process":{"pid":1},"signal":15}"#).unwrap();
        assert_eq!(by_number.signal, SignalName::Terminate);
    }
}
