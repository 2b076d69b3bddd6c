//! The two number types of the step: f32 to train, f64 to check gradients.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

/// A real number that the step can be computed in.
pub trait Real:
    Copy
    + Default
    + Debug
    + PartialEq
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + MulAssign
    + 'static
{
    const ZERO: Self;
    const ONE: Self;
    /// Lower than every finite value that occurs.
    const LOWEST: Self;

    fn from_f32(value: f32) -> Self;
    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
    /// e^self. For f32 a polynomial that the compiler can vectorise, within 2 units in the last place between -87 and
    /// 88 and clamped outside.
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;
    fn largest(self, other: Self) -> Self;
    /// The values in this type; borrowed where they are already.
    fn convert(values: &[f32]) -> Cow<'_, [Self]>;
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LOWEST: Self = f32::MIN;

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        value as f32
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    #[inline(always)]
    fn exp(self) -> Self {
        // 2^n * e^r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to the nearest integer, which is then in the low bits.
        const ROUND: f32 = 12_582_912.0;
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        let x = if self < -87.0 { -87.0 } else { self };
        let x = if x > 88.0 { 88.0 } else { x };
        let shifted = x * std::f32::consts::LOG2_E + ROUND;
        let n = shifted - ROUND;
        let r = x - n * LN2_HIGH - n * LN2_LOW;
        let mut polynomial = 1.987_569_1e-4_f32;
        for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            polynomial = polynomial * r + coefficient;
        }
        let fraction = polynomial * r * r + r + 1.0;
        let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
        fraction * power
    }

    #[inline(always)]
    fn ln(self) -> Self {
        f32::ln(self)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }

    #[inline(always)]
    fn largest(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    fn convert(values: &[f32]) -> Cow<'_, [Self]> {
        Cow::Borrowed(values)
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LOWEST: Self = f64::MIN;

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f64::from(value)
    }

    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        value
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }

    #[inline(always)]
    fn exp(self) -> Self {
        f64::exp(self)
    }

    #[inline(always)]
    fn ln(self) -> Self {
        f64::ln(self)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }

    #[inline(always)]
    fn largest(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    fn convert(values: &[f32]) -> Cow<'_, [Self]> {
        Cow::Owned(values.iter().map(|value| f64::from(*value)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::Real;

    #[test]
    fn polynomial_exp_agrees_with_the_standard_one() {
        let mut worst = 0.0_f64;
        for i in -87_000..88_000 {
            let x = i as f32 / 1000.0;
            let wanted = f64::from(x).exp();
            worst = worst.max((f64::from(Real::exp(x)) - wanted).abs() / wanted);
        }
        assert!(worst < 3e-7, "relative error {worst:e}");
        assert_eq!(Real::exp(0.0_f32), 1.0);
        assert!(Real::exp(-1e30_f32) < 1e-37);
        assert!(Real::exp(1e30_f32).is_finite());
    }
}
