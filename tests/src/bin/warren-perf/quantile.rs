//! Order statistics of a sample.

/// The value below which `share` of the sample lies (nearest rank).
///
/// # Panics
/// If the sample is empty.
pub fn quantile(sample: &[f64], share: f64) -> f64 {
    let mut sorted = sample.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// Rounded to three places, as the reports show it.
pub fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantile_is_the_nearest_rank() {
        let sample = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(quantile(&sample, 0.5), 2.0);
        assert_eq!(quantile(&sample, 0.99), 4.0);
        assert_eq!(quantile(&sample, 0.0), 1.0);
    }
}
