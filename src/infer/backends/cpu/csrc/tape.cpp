// A recorded sequence of the library's calls, run again without Python. See backends/cpu/tape.py.
#include <cstring>
#include <utility>
#include <vector>

#include "api.h"

namespace infer {

typedef uint64_t Slot;  // an argument as 64 bits: a pointer, a sign-extended integer, or the bits of a double

template <class T>
static T unpack(Slot slot) {
    if constexpr (std::is_floating_point_v<T>) {
        double value;
        std::memcpy(&value, &slot, sizeof value);
        return T(value);
    } else if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(slot);
    } else {
        return T(int64_t(slot));
    }
}

template <auto FUNCTION, class... Args, size_t... I>
static void apply(const Slot* slots, void (*)(Args...), std::index_sequence<I...>) {
    FUNCTION(unpack<Args>(slots[I])...);
}

template <class... Args>
static constexpr std::index_sequence_for<Args...> numbers(void (*)(Args...)) {
    return {};
}

template <auto FUNCTION>
static void invoke(const Slot* slots) {
    apply<FUNCTION>(slots, FUNCTION, numbers(FUNCTION));
}

struct Operation {
    const char* name;
    void (*invoke)(const Slot*);
    size_t num_args;
};

template <auto FUNCTION>
static Operation operation(const char* name) {
    return {name, invoke<FUNCTION>, decltype(numbers(FUNCTION))::size()};
}

#define OPERATION(function) operation<function>(#function)

static const Operation* find(const char* name) {
    static const Operation OPERATIONS[] = {
        OPERATION(infer_linear),   OPERATION(infer_block_linear), OPERATION(infer_packed_rows), OPERATION(infer_block_rows),
        OPERATION(infer_rms_norm), OPERATION(infer_gate),         OPERATION(infer_rotary),      OPERATION(infer_unary),
        OPERATION(infer_angles),   OPERATION(infer_write_kv),     OPERATION(infer_attention),   OPERATION(infer_moe),
        OPERATION(infer_route),    OPERATION(infer_widen),        OPERATION(infer_add_shared),  OPERATION(infer_scale),
        OPERATION(infer_draw),     OPERATION(infer_best),         OPERATION(infer_gather_rows), OPERATION(infer_copy_rows),
        OPERATION(infer_place_rows),
    };
    for (const Operation& known : OPERATIONS)
        if (!std::strcmp(known.name, name)) return &known;
    return nullptr;
}

struct Tape {
    std::vector<std::pair<const Operation*, size_t>> calls;  // with the place of the first argument
    std::vector<Slot> slots;
};

}  // namespace infer

using namespace infer;

extern "C" void* infer_tape_create() { return new Tape; }

extern "C" void infer_tape_destroy(void* tape) { delete static_cast<Tape*>(tape); }

extern "C" int infer_tape_add(void* tape, const char* name, const uint64_t* slots, int64_t count) {
    Tape& t = *static_cast<Tape*>(tape);
    const Operation* known = find(name);
    if (!known || known->num_args != size_t(count)) return 0;
    t.calls.emplace_back(known, t.slots.size());
    t.slots.insert(t.slots.end(), slots, slots + count);
    return 1;
}

extern "C" void infer_tape_run(const void* tape) {
    const Tape& t = *static_cast<const Tape*>(tape);
    for (const auto& [known, first] : t.calls) known->invoke(t.slots.data() + first);
}
