// The threads of one parallel region, kept at hand through many pieces of parallel work.
//
// A region of OpenMP's ends when every thread has come and gone: between operators of microseconds
// that costs as much as the work, and where another process has the core it costs a time slice. Here
// one region spans them all. A piece of work is on offer while the leader works at it, whoever is
// at hand takes part, and the leader waits for those alone who have begun.
//
//     offer(work)   ticket odd    a helper enters: `inside` up, and the ticket is still the same
//     withdraw      ticket even   the helpers inside finish; then the work is done
//
// So work must be handed out task by task, as all kernels do, and not by the number of the thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <sched.h>

#include "abi.h"

namespace ow {

class Team {
 public:
  // Runs lead(argument) on the calling thread with a team of `num_threads` at hand.
  static void gather(Parallel parallel, int32_t num_threads, void (*lead)(void*), void* argument) {
    Team team{lead, argument};
    led() = &team;
    parallel(&Team::work, &team, num_threads, 0);
    led() = nullptr;
  }

  // A `Parallel` for the leader's operators.
  static void share(void (*work)(void*), void* argument, unsigned num_threads, unsigned) {
    Team& team = *led();
    team.work_ = work;
    team.argument_ = argument;
    team.room = int32_t(num_threads) - 1;
    const uint32_t ticket = team.ticket.load(std::memory_order_relaxed);
    team.ticket.store(ticket + 1);
    work(argument);
    // In one order for all: either the helper finds the ticket changed, or it is counted here.
    team.ticket.store(ticket + 2);
    for (int spins = 0; team.inside.load() > 0; ++spins) relax(spins);
  }

 private:
  Team(void (*lead)(void*), void* argument) : lead_(lead), lead_argument_(argument) {}

  void (*lead_)(void*);
  void* lead_argument_;
  void (*work_)(void*) = nullptr;
  void* argument_ = nullptr;
  alignas(64) std::atomic<uint32_t> ticket{0};
  std::atomic<bool> over{false};
  alignas(64) std::atomic<int32_t> inside{0};
  std::atomic<int32_t> room{0};  // for helpers that have not taken part yet

  static Team*& led() {
    static thread_local Team* team = nullptr;
    return team;
  }

  static void work(void* argument) {
    Team& team = *static_cast<Team*>(argument);
    if (led() == &team) {
      team.lead_(team.lead_argument_);
      team.over.store(true);
    } else {
      team.help();
    }
  }

  void help() {
    uint32_t done = 0;
    for (int spins = 0; !over.load(std::memory_order_acquire); ++spins) {
      const uint32_t now = ticket.load(std::memory_order_acquire);
      if (now % 2 == 0 || now == done) {
        relax(spins);
        continue;
      }
      inside.fetch_add(1);
      // An operator has working memory for so many threads and no more.
      if (ticket.load() == now && room.fetch_sub(1) > 0) work_(argument_);
      inside.fetch_sub(1);
      done = now;
      spins = 0;
    }
  }

  // Gives the core away after some microseconds: who is waited for may need it.
  static void relax(int spins) {
    if (spins > 1000) {
      sched_yield();
      return;
    }
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
};

}  // namespace ow
