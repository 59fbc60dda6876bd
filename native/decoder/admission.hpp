// Which slot a new request takes, and which cached prefix it starts from. Pure: slots in, decision out.
//
//   slot 0  busy  [system prompt | conversation A ......]      a busy slot's prefix can be copied
//   slot 1  free  [system prompt | conversation B ..]          a free slot's prefix can be taken in place or copied
//   slot 2  free  []
//
// Taking a slot in place drops what it holds beyond the common prefix. The next turn of a conversation drops next to nothing;
// another conversation with the same system prompt would drop a whole conversation, so it gets the least recently used slot
// instead, with the prefix copied there. Refused: always the free slot with the longest prefix (interleaved conversations
// with a common system prompt evict each other although other slots are free).
#pragma once

#include "protocol.hpp"

#include <cstdint>
#include <vector>

namespace ringfence {

struct SlotView {
    const std::vector<Token>* cells;  // tokens whose keys and values the slot holds
    bool is_free;
    uint64_t last_used;  // larger is later; 0: never
};

struct Admission {
    int slot = -1;       // -1: all busy
    int64_t reused = 0;  // tokens of the prompt that need no reading
    int source = -1;     // slot to copy them from; -1: they are in the slot itself
};

struct AdmissionRules {
    bool can_copy;             // false for recurrent models: their state can't be cut to a prefix
    int64_t min_copied;        // a copy must save this many tokens more than the slot's own prefix
};

Admission admit(const std::vector<SlotView>& slots, const std::vector<Token>& prompt, const AdmissionRules& rules);

}  // namespace ringfence
