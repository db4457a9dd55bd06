// What an operator's line may hold beside steps. A line with any of these is no fixed chain: the torch side makes a
// Program of it for each call.
#pragma once

#include "program.h"

namespace fused_act {

// Takes an activation's name ('A') and, optionally, its first scalar: stands for the steps of that activation's line.
struct Activation {
  static constexpr const char* parameters = "Af";
  static constexpr const char* gradient = "";
};

// First in a line: x is packed along its last dimension. The chain goes on with the first half of it (Halves), or with
// the elements of even index (Pairs); the rest is operand 0.
struct Halves {
  static constexpr const char* parameters = "";
  static constexpr const char* gradient = "";
};
struct Pairs : Halves {};

// Alone in a line: the steps are given in each call.
struct Listed {
  static constexpr const char* parameters = "";
  static constexpr const char* gradient = "";
};

// slot = value; value = operand; and a step whose operand is a slot.
template <int slot>
struct Save {
  static constexpr const char* parameters = "";
  static constexpr const char* gradient = "";
};
struct Load {
  static constexpr const char* parameters = "T";
  static constexpr const char* gradient = "";
};
template <class Step, int slot>
struct Saved {
  static constexpr const char* parameters = "";
  static constexpr const char* gradient = Step::gradient;
};

// A step (or Load, or Activation) that takes the parameters of these places in the line, x being 0, not the next ones.
template <class Step, int... place>
struct Given {
  static constexpr const char* parameters = Step::parameters;
  static constexpr const char* gradient = Step::gradient;
};

// One entry of a line, as data. (`is<T>` of what describes it: whether it is T, or the step T.)
struct Entry {
  enum Kind { step, activation, halves, pairs, listed, save, load } kind = step;
  Code code = Code::load;
  const char* parameters = "";
  const double* absent = nullptr;  // what a scalar of the step is where None is given; else the step is left out
  bool (*from_output)(const double*) = nullptr;
  const char* (*wrong)(const double*) = nullptr;
  int slot = -1;
  int places[4] = {-1, -1, -1, -1};
};

template <class Step>
struct Describe {
  static_assert(code_of<Step> != Code::load, "a step that is not in FUSED_ACT_STEPS");
  template <class Entry>
  static constexpr bool is = std::is_same_v<Entry, Step>;
  static constexpr bool fixed = true;
  static Entry entry() {
    Entry e;
    e.code = code_of<Step>;
    e.parameters = Step::parameters;
    e.absent = Step::absent;
    e.from_output = &Step::derivative_from_output;
    e.wrong = &Step::wrong;
    return e;
  }
};
template <Entry::Kind kind>
struct DescribeKind {
  static constexpr bool fixed = false;
  template <class>
  static constexpr bool is = false;
  static Entry entry() {
    Entry e;
    e.kind = kind;
    return e;
  }
};
template <>
struct Describe<Halves> : DescribeKind<Entry::halves> {};
template <>
struct Describe<Pairs> : DescribeKind<Entry::pairs> {
  template <class Entry>
  static constexpr bool is = std::is_same_v<Entry, Pairs>;
};
template <>
struct Describe<Listed> : DescribeKind<Entry::listed> {};
template <>
struct Describe<Activation> : DescribeKind<Entry::activation> {
  static Entry entry() {
    Entry e = DescribeKind::entry();
    e.parameters = Activation::parameters;
    return e;
  }
};
template <>
struct Describe<Load> : DescribeKind<Entry::load> {
  static Entry entry() {
    Entry e = DescribeKind::entry();
    e.parameters = Load::parameters;
    return e;
  }
};
template <int slot>
struct Describe<Save<slot>> : DescribeKind<Entry::save> {
  static_assert(slot < kMaxSlots);
  static Entry entry() {
    Entry e = DescribeKind<Entry::save>::entry();
    e.slot = slot;
    return e;
  }
};
template <class Step, int slot>
struct Describe<Saved<Step, slot>> {
  static_assert(slot < kMaxSlots);
  static constexpr bool fixed = false;
  template <class Entry>
  static constexpr bool is = Describe<Step>::template is<Entry>;
  static Entry entry() {
    Entry e = Describe<Step>::entry();
    e.parameters = "";
    e.slot = slot;
    return e;
  }
};
template <class Step, int... place>
struct Describe<Given<Step, place...>> {
  static constexpr bool fixed = false;
  template <class Entry>
  static constexpr bool is = Describe<Step>::template is<Entry>;
  static Entry entry() {
    Entry e = Describe<Step>::entry();
    int n = 0;
    ((e.places[n++] = place), ...);
    return e;
  }
};

// A line's steps: a compiled chain where all of them are steps, and always a description of them.
template <class... Steps>
struct Pattern {
  static constexpr bool kFixed = (Describe<Steps>::fixed && ...);
  template <class... S>
  static auto chain_of(Types<S...>) {
    if constexpr (kFixed) {
      return Chain<S...>{};
    } else {
      return Program{};
    }
  }
  using Compiled = decltype(chain_of(Types<Steps...>{}));
};

}  // namespace fused_act
