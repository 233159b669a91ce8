// What Python holds: a compiled problem with the memory of one evaluator.
#pragma once
#include <utility>

#include "schedule.h"

namespace stretto {
constexpr int32_t kFifo = 3;  // beside the values of sched::Discipline: a fixed order, in program order

struct ScheduleObject {
  explicit ScheduleObject(sched::Problem&& p) : problem(std::move(p)), scratch(problem) {}
  ScheduleObject(const ScheduleObject&) = delete;
  sched::Problem problem;
  sched::Evaluator scratch;
};
}  // namespace stretto
