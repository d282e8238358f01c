// Every rule of lse.h and lse_backward.h, for float and double.
#include "lse.h"

#include <initializer_list>

#include "check.h"
#include "lse_backward.h"

namespace {

using namespace neginf;

template <typename Real>
struct Row {
  Real max = masked_score<Real>();
  Real sum = 0;
};

// The online softmax as a kernel runs it, one score at a time, on raw scores r with s = r * scale.
template <typename Real>
Finalized<Real> softmax(std::initializer_list<Real> raw_scores, Real scale) {
  Row<Real> row;
  for (const Real score : raw_scores) {
    const Real new_max = running_max(row.max, score);
    const Real shift = softmax_shift(new_max) * scale;
    const Real rescale = std::exp(softmax_shift(row.max) * scale - shift);
    row.sum = (is_masked(row.max) ? row.sum : row.sum * rescale) + std::exp(score * scale - shift);
    row.max = new_max;
  }
  return finalize(row.max, row.sum, scale);
}

template <typename Real>
BasicLse<Real> lse_of(Real score) {
  return finalize(score, Real(1), Real(1)).lse;
}

template <typename Real>
BasicLse<Real> nan_lse() {
  return finalize(Real(0), kNan<Real>, Real(1)).lse;
}

template <typename Real>
void test_empty() {
  CHECK(BasicLse<Real>::empty().is_empty());
  CHECK(BasicLse<Real>::empty().value() == -kInf<Real>);
  CHECK(masked_score<Real>() == -kInf<Real>);
  CHECK(is_masked(-kInf<Real>));
  CHECK(!is_masked(kInf<Real>));
  CHECK(!is_masked(kNan<Real>));
  CHECK(!is_masked(std::numeric_limits<Real>::lowest()));
  CHECK(!lse_of(std::numeric_limits<Real>::lowest()).is_empty());
  CHECK(!nan_lse<Real>().is_empty());
}

template <typename Real>
void test_running_max_and_shift() {
  CHECK(running_max(Real(1), Real(2)) == 2);
  CHECK(running_max(-kInf<Real>, Real(-5)) == -5);
  CHECK(running_max(-kInf<Real>, -kInf<Real>) == -kInf<Real>);
  CHECK(running_max(kNan<Real>, Real(3)) == 3);
  CHECK(running_max(Real(3), kNan<Real>) == 3);
  CHECK(softmax_shift(-kInf<Real>) == 0);
  CHECK(softmax_shift(Real(-1e30)) == Real(-1e30));
  CHECK(softmax_shift(kInf<Real>) == kInf<Real>);
}

template <typename Real>
void test_finalize() {
  const auto ordinary = finalize(Real(4), Real(2), Real(0.5));
  CHECK(near(ordinary.lse.value(), Real(2) + std::log(Real(2))));
  CHECK(ordinary.scale == Real(0.5));
  CHECK(ordinary.sees_keys);
  CHECK(ordinary.output(6) == 3);

  const auto empty = finalize(-kInf<Real>, Real(0), Real(0.125));
  CHECK(empty.lse.is_empty());
  CHECK(!empty.sees_keys);
  CHECK(empty.output(0) == 0);
  CHECK(empty.output(kNan<Real>) == 0);
  CHECK(empty.output(kInf<Real>) == 0);

  // Emptiness is decided by the sum: a NaN sum is not empty even where the maximum skipped it.
  for (const Real max : {-kInf<Real>, Real(0), Real(7), kInf<Real>, kNan<Real>}) {
    const auto nan = finalize(max, kNan<Real>, Real(1));
    CHECK(std::isnan(nan.lse.value()));
    CHECK(nan.sees_keys);
    CHECK(std::isnan(nan.output(1)));
    CHECK(std::isnan(nan.output(0)));
  }

  // +inf is never a public value, also when it appears only after scaling.
  CHECK(std::isnan(finalize(kInf<Real>, Real(1), Real(1)).lse.value()));
  const Real largest = std::numeric_limits<Real>::max();
  CHECK(std::isnan(finalize(largest, Real(1), Real(4)).lse.value()));
  CHECK(finalize(-largest, Real(1), Real(4)).lse.is_empty());
  CHECK(finalize(-largest, Real(1), Real(4)).output(kNan<Real>) == 0);

  // Very low and very high scores are ordinary.
  CHECK(finalize(Real(-46341), Real(1), Real(1)).lse.value() == Real(-46341));
  CHECK(near(finalize(Real(1.4e11), Real(1), Real(1)).lse.value(), Real(1.4e11)));
  CHECK(finalize(-largest, Real(1), Real(1)).lse.value() == -largest);
}

template <typename Real>
void test_softmax_in_any_order() {
  const Real masked = masked_score<Real>();
  for (const Real scale : {Real(1), Real(0.125)}) {
    const Real expected = std::log(std::exp(2 * scale) + std::exp(-3 * scale));
    CHECK(near(softmax({Real(2), Real(-3)}, scale).lse.value(), expected));
    CHECK(near(softmax({Real(-3), Real(2)}, scale).lse.value(), expected));
    // The first visible key comes after masked ones, before them, between them.
    CHECK(near(softmax({masked, masked, Real(2), Real(-3)}, scale).lse.value(), expected));
    CHECK(near(softmax({Real(2), Real(-3), masked}, scale).lse.value(), expected));
    CHECK(near(softmax({masked, Real(-3), masked, Real(2)}, scale).lse.value(), expected));
    CHECK(softmax({masked, masked, masked}, scale).lse.is_empty());
    CHECK(softmax<Real>({}, scale).lse.is_empty());
    CHECK(std::isnan(softmax({masked, kNan<Real>}, scale).lse.value()));
    CHECK(std::isnan(softmax({kNan<Real>, masked}, scale).lse.value()));
    CHECK(std::isnan(softmax({Real(1), kNan<Real>, Real(2)}, scale).lse.value()));
    CHECK(std::isnan(softmax({Real(1), kInf<Real>, Real(2)}, scale).lse.value()));
  }
}

template <typename Real>
Merged<Real> merge_of(std::initializer_list<BasicLse<Real>> states) {
  return merge<Real>(static_cast<int>(states.size()), [&](int s) { return states.begin()[s]; });
}

template <typename Real>
void test_merge() {
  const auto empty = BasicLse<Real>::empty();
  const auto a = lse_of(Real(0.5));
  const auto low = lse_of(Real(-46341));
  CHECK(merge_of<Real>({}).lse.is_empty());
  CHECK(merge_of({empty}).lse.is_empty());
  CHECK(merge_of({empty, empty}).lse.is_empty());
  CHECK(merge_of({a}).lse.value() == a.value());
  CHECK(merge_of({a, empty}).lse.value() == a.value());
  CHECK(merge_of({empty, a, empty}).lse.value() == a.value());
  CHECK(merge_of({empty, low}).lse.value() == low.value());
  CHECK(near(merge_of({a, a}).lse.value(), Real(0.5) + std::log(Real(2))));
  CHECK(near(merge_of({a, a, a}).lse.value(), Real(0.5) + std::log(Real(3))));
  CHECK(merge_of({a, low}).lse.value() == a.value());
  CHECK(merge_of({lse_of(Real(0)), lse_of(Real(200))}).lse.value() == 200);
  CHECK(near(merge_of({low, low}).lse.value(), Real(-46341) + std::log(Real(2))));
  const auto nan = nan_lse<Real>();
  CHECK(std::isnan(merge_of({nan}).lse.value()));
  CHECK(std::isnan(merge_of({nan, empty}).lse.value()));
  CHECK(std::isnan(merge_of({empty, nan}).lse.value()));
  CHECK(std::isnan(merge_of({a, nan}).lse.value()));
  CHECK(std::isnan(merge_of({nan, a}).lse.value()));
}

// merge_by_lanes as `lanes` lanes would run it: each alone, once to learn its maximum, once to
// learn its sum, once with the maximum and the sum of all. Returns what the last lane gets.
template <typename Real>
Merged<Real> merge_by(int lanes, std::initializer_list<BasicLse<Real>> states) {
  const auto states_of = [&](int lane) {
    return [&states, lane, lanes](const auto& use) {
      for (size_t s = lane; s < states.size(); s += lanes) use(states.begin()[s]);
    };
  };
  Real max = masked_score<Real>();
  for (int lane = 0; lane < lanes; ++lane) {
    const auto learn = [&](Real x) { return max = running_max(max, x); };
    merge_by_lanes<Real>(states_of(lane), learn, [](Real x) { return x; });
  }
  const auto reduce_max = [&](Real) { return max; };
  Real sum = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    const auto learn = [&](Real x) { return sum += x; };
    merge_by_lanes<Real>(states_of(lane), reduce_max, learn);
  }
  const auto reduce_sum = [&](Real) { return sum; };
  return merge_by_lanes<Real>(states_of(lanes - 1), reduce_max, reduce_sum);
}

// Sharing the work among lanes, also more lanes than states, changes nothing but the order of sums.
template <typename Real>
void test_merge_by_lanes() {
  const auto empty = BasicLse<Real>::empty();
  const auto a = lse_of(Real(1)), b = lse_of(Real(3)), low = lse_of(Real(-46341));
  for (const int lanes : {1, 2, 3, 8}) {
    CHECK(merge_by<Real>(lanes, {}).lse.is_empty());
    CHECK(merge_by(lanes, {empty, empty, empty}).lse.is_empty());
    CHECK(merge_by(lanes, {empty, a, empty, empty}).lse.value() == a.value());
    CHECK(merge_by(lanes, {empty, a, empty, empty}).weight_of(a) == 1);
    CHECK(merge_by(lanes, {low, empty, empty}).lse.value() == low.value());
    CHECK(std::isnan(merge_by(lanes, {empty, a, nan_lse<Real>(), b}).lse.value()));
    CHECK(std::isnan(merge_by(lanes, {nan_lse<Real>(), empty}).weight_of(nan_lse<Real>())));
    const auto merged = merge_by(lanes, {a, b, empty, a, low, b});
    const auto alone = merge_of({a, b, empty, a, low, b});
    CHECK(near(merged.lse.value(), alone.lse.value()));
    CHECK(near(merged.weight_of(b), alone.weight_of(b)));
    CHECK(merged.weight_of(empty) == 0);
  }
}

template <typename Real>
void test_weights() {
  const auto empty = BasicLse<Real>::empty();
  const auto a = lse_of(Real(1));
  const auto b = lse_of(Real(3));
  const auto merged = merge_of({a, empty, b});
  CHECK(near(merged.weight_of(a) + merged.weight_of(b), Real(1)));
  CHECK(near(merged.weight_of(a) / merged.weight_of(b), std::exp(Real(-2))));
  CHECK(merged.weight_of(empty) == 0);
  CHECK(merge_of({a}).weight_of(a) == 1);
  CHECK(merge_of({empty, empty}).weight_of(empty) == 0);

  const auto with_nan = merge_of({a, nan_lse<Real>(), empty});
  CHECK(with_nan.weight_of(empty) == 0);
  CHECK(std::isnan(with_nan.weight_of(a)));
  CHECK(std::isnan(with_nan.weight_of(nan_lse<Real>())));

  // ln 2 is lost in the L of states this large; their weights add up to 1 all the same.
  for (const Real value : {Real(-46341), Real(1.4e11), Real(-1.4e11), Real(-1e30)}) {
    const auto large = lse_of(value);
    CHECK(merge_of({large, large}).weight_of(large) == Real(0.5));
    CHECK(merge_of({large, large, empty, large, large}).weight_of(large) == Real(0.25));
  }
}

template <typename Real>
void test_sink() {
  const auto row = finalize(Real(1), Real(2), Real(1));
  const auto keyless = finalize(-kInf<Real>, Real(0), Real(1));

  const auto with_sink = merge_sink(row, Real(0.5));
  const Real expected = std::log(2 * std::exp(Real(1)) + std::exp(Real(0.5)));
  CHECK(near(with_sink.lse.value(), expected));
  CHECK(near(with_sink.output(1), std::exp(Real(1) - expected)));

  // The sink weighs half of a row whose L is as large, however large that is.
  CHECK(merge_sink(finalize(Real(1.4e11), Real(1), Real(1)), Real(1.4e11)).output(1) == Real(0.5));

  const auto unchanged = merge_sink(row, -kInf<Real>);
  CHECK(unchanged.lse.value() == row.lse.value());
  CHECK(unchanged.output(3) == row.output(3));

  // A finite sink on a row without keys: O stays exactly 0, L is the sink.
  const auto only_sink = merge_sink(keyless, Real(-7));
  CHECK(only_sink.lse.value() == -7);
  CHECK(only_sink.output(kNan<Real>) == 0);
  CHECK(merge_sink(keyless, -kInf<Real>).lse.is_empty());
  CHECK(merge_sink(keyless, -kInf<Real>).output(kNan<Real>) == 0);

  for (const Real bad : {kInf<Real>, kNan<Real>}) {
    CHECK(std::isnan(merge_sink(row, bad).lse.value()));
    CHECK(std::isnan(merge_sink(row, bad).output(1)));
    CHECK(std::isnan(merge_sink(keyless, bad).lse.value()));
    CHECK(std::isnan(merge_sink(keyless, bad).output(0)));  // one NaN row, not half of one
  }
  const auto nan_row = finalize(Real(0), kNan<Real>, Real(1));
  CHECK(std::isnan(merge_sink(nan_row, Real(1)).lse.value()));
  CHECK(std::isnan(merge_sink(nan_row, Real(1)).output(1)));
}

template <typename Real>
void test_divisor() {
  using D = BasicDivisor<Real>;
  // A buffer from another library may hold +inf; it must not pass for padding.
  const Real infinity = kInf<Real>;
  const auto& foreign = reinterpret_cast<const BasicLse<Real>&>(infinity);
  CHECK(std::isnan(D::of(foreign).probability(Real(0))));
  CHECK(D::of(foreign).probability(masked_score<Real>()) == 0);
  const auto row = lse_of(Real(2));
  CHECK(near(D::of(row).probability(Real(2)), Real(1)));
  CHECK(near(D::of(row).probability(Real(1)), std::exp(Real(-1))));
  CHECK(D::of(row).probability(masked_score<Real>()) == 0);

  // Empty: exp(-inf - 0), not exp(-inf - -inf).
  const auto empty = D::of(BasicLse<Real>::empty());
  CHECK(empty.probability(masked_score<Real>()) == 0);
  CHECK(empty.probability(Real(0)) == 1);

  // Tile padding: its scores are whatever the tile held.
  for (const Real score : {Real(0), Real(3), Real(-3), std::numeric_limits<Real>::max()}) {
    CHECK(D::out_of_bounds().probability(score) == 0);
  }
  CHECK(D::out_of_bounds().probability(masked_score<Real>()) == 0);

  // A NaN row stays NaN for the keys it sees and does not reach those it does not see.
  const auto nan = D::of(nan_lse<Real>());
  CHECK(std::isnan(nan.probability(Real(0))));
  CHECK(nan.probability(masked_score<Real>()) == 0);
  CHECK(std::isnan(D::of(row).probability(kNan<Real>)));

  CHECK(near(D::of(lse_of(Real(-46341))).probability(Real(-46341)), Real(1)));
}

// exp2 of the exponent is the probability wherever is_exact() says so.
template <typename Real>
void test_log2_divisor() {
  using D = BasicDivisor<Real>;
  using D2 = BasicLog2Divisor<Real>;
  const Real log2e = Real(1.4426950408889634);
  for (const Real lse : {Real(-700), Real(-1.5), Real(0), Real(2), Real(700)}) {
    const D divisor = D::of(lse_of(lse));
    CHECK(D2(divisor).is_exact());
    for (const Real raw : {Real(-3), Real(0), Real(1.25), Real(8)}) {
      const Real scale = Real(0.125);
      const Real score = lse - 1 + raw * scale;
      const Real got = std::exp2(D2(divisor).exponent(score / scale, scale * log2e));
      CHECK(std::abs(got / divisor.probability(score) - 1) < Real(2e-4));
    }
    CHECK(std::exp2(D2(divisor).exponent(masked_score<Real>(), log2e)) == 0);
  }
  CHECK(std::exp2(D2(D::of(BasicLse<Real>::empty())).exponent(masked_score<Real>(), log2e)) == 0);
  CHECK(std::exp2(D2(D::out_of_bounds()).exponent(Real(0), log2e)) == 0);
  CHECK(!D2(D::out_of_bounds()).is_exact());
  CHECK(!D2(D::of(nan_lse<Real>())).is_exact());
  CHECK(!D2(D::of(lse_of(Real(711)))).is_exact());
  CHECK(!D2(D::of(lse_of(Real(-711)))).is_exact());
}

template <typename Real>
void test_all() {
  test_empty<Real>();
  test_running_max_and_shift<Real>();
  test_finalize<Real>();
  test_softmax_in_any_order<Real>();
  test_merge<Real>();
  test_merge_by_lanes<Real>();
  test_weights<Real>();
  test_sink<Real>();
  test_divisor<Real>();
  test_log2_divisor<Real>();
}

}  // namespace

int main() {
  test_all<float>();
  test_all<double>();
  return report();
}
