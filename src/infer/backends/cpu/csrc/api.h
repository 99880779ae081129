// What Python calls. Pointers are to contiguous tensors whose shapes and dtypes the caller has checked.
#pragma once

#include <cstdint>

enum Dtype { FP32 = 0, BF16 = 1, FP8 = 2, FP16 = 3 };  // FP8: e4m3fn, of the KV cache alone; FP16: of weights that become blocks

extern "C" {
void* infer_pool_create(int threads, int spins);
void infer_pool_destroy(void* pool);

// packed: the weight lies as packed.h describes, else row after row.
void infer_linear(void* pool, int dtype, int packed, int out_fp32, const void* x, const void* w, const void* bias, void* y,
                  int64_t tokens, int64_t n, int64_t k);

// Rows of a packed weight (packed.h), in the dtype they are stored in.
void infer_packed_rows(int dtype, const void* packed, const int64_t* ids, void* y, int64_t count, int64_t k);

// Weights in blocks, see block_format.h. `stored` is row after row as in a GGUF; `packed` has the same number of bytes.
void infer_pack_blocks(void* pool, int kind, const void* stored, void* packed, int64_t n, int64_t k);
// Rows [n, words of four bytes] into tiles of sixteen, [n / 16, words, 16]: the order of packed.h.
void infer_pack_words(void* pool, const void* rows, void* packed, int64_t n, int64_t words);
// Plain numbers (FP32, BF16 or FP16) into blocks of Q8_0 or Q4_1, see encode.cpp. 0: not all of them have such blocks.
int64_t infer_encode_blocks(void* pool, int dtype, int kind, const void* rows, int64_t blocks, void* out);
void infer_block_rows(int dtype, int kind, const void* packed, const int64_t* ids, void* y, int64_t count, int64_t k);
// Bytes of `work` for so many tokens: activations in int8, and scratch of each thread.
int64_t infer_block_work(void* pool, int64_t tokens, int64_t k);
void infer_block_linear(void* pool, int dtype, int out_fp32, int kind, const void* x, const void* w, const void* bias,
                        void* y, void* work, int64_t count, int64_t n, int64_t k);

// residual null: y = norm(x). Else total = x + residual, y = norm(total).
void infer_rms_norm(void* pool, int dtype, int weight_dtype, const void* x, const void* residual, const void* weight,
                    void* y, void* total, int64_t rows, int64_t n, float eps);
// kind 0: silu, 1: gelu (tanh). x [rows, 2n] -> y [rows, n].
void infer_gate(void* pool, int dtype, int kind, const void* x, void* y, int64_t rows, int64_t n);
// heads [tokens, num_heads] blocks of `size`, row stride `stride` elements; the first 2 * half of each are rotated.
void infer_rotary(void* pool, int dtype, const void* x, const float* cos, const float* sin, void* y, int64_t tokens,
                  int64_t heads, int64_t size, int64_t half, int64_t stride);
// A token for each of `count` rows of logits [., n] fp32, named by `rows`; see sampling.cpp. top_k 0: all. numbers in [0, 1).
// masks null, or for each a bit per token in whole 32-bit words: only tokens whose bit is set; temperature 0 is the best of
// them, -1 the id where none is left.
int64_t infer_draw_work(void* pool, int masked, int64_t n);
void infer_draw(void* pool, const float* logits, const int64_t* rows, const float* temperatures, const int64_t* top_k,
                const double* top_p, const float* min_p, const double* numbers, const uint8_t* masks, int64_t* ids, void* work,
                int64_t count, int64_t n);
// The best of each row of logits [count, n] and its id: of equal values the first, a NaN before all others.
void infer_best(void* pool, const float* logits, int64_t* ids, float* values, int64_t count, int64_t n);
// y = factor * x.
void infer_scale(int dtype, const void* x, void* y, int64_t count, float factor);
// Rows of so many bytes that lie `stride` bytes apart, one behind the other.
void infer_copy_rows(const void* x, void* y, int64_t rows, int64_t row, int64_t stride);
// Rows of so many bytes to places `stride` bytes apart.
void infer_place_rows(const void* x, void* y, int64_t rows, int64_t row, int64_t stride);
// Rows of so many bytes, by number.
void infer_gather_rows(const void* x, const int64_t* ids, void* y, int64_t count, int64_t row);
// kind 0: sigmoid, 1: tanh.
void infer_unary(int dtype, int kind, const void* x, void* y, int64_t count);
// cos and sin of position * frequency, times factor; fp32 [tokens, size].
void infer_angles(const int64_t* positions, const float* frequencies, float factor, float* cos, float* sin, int64_t tokens,
                  int64_t size);
// k and v of some tokens, rows of k_row and v_row elements that lie k_stride and v_stride apart, to their slots. In
// another dtype than they come in: rounded, for FP8 after a division by the scales.
void infer_write_kv(int dtype, int cache_dtype, const void* k, const void* v, void* k_cache, void* v_cache,
                    const int64_t* slots, int64_t tokens, int64_t k_row, int64_t v_row, int64_t k_stride, int64_t v_stride,
                    float k_scale, float v_scale);

struct AttentionArgs {
    const void* q;         // [T, H, D], tokens q_stride elements apart
    const void* k_cache;   // [blocks, block_size, K, D]
    const void* v_cache;   // [blocks, block_size, K, V]
    void* out;             // [T, H, V]
    const int32_t* query_starts;  // [R + 1]
    const int32_t* seq_lens;      // [R]
    const int32_t* block_table;   // [R, table_width]
    int64_t rows, table_width, block_size, heads, kv_heads, head_size, value_size, q_stride;
    float scale, softcap;  // softcap 0: none
    int64_t window;        // 0: none
    int64_t cache_dtype;   // the computed one, or FP8
    float out_scale;       // multiplies the result: the scale that values were stored with
};
void infer_attention(void* pool, int dtype, const AttentionArgs* args);

// How a stack of experts' weights lies: a block kind (0 and up), or one of these.
enum ExpertForm { PACKED = -1, PLAIN = -2 };

// Bytes of `work`.
int64_t infer_moe_work(void* pool, int dtype, int up_form, int down_form, int64_t tokens, int64_t top_k, int64_t n,
                       int64_t inner);
// ids [T, K], weights [T, K] -> y [T, N]; gate_up [E * 2I, N], down [E * N, I].
void infer_moe(void* pool, int dtype, const void* x, const int64_t* ids, const float* weights, const void* gate_up, int up_form,
               const void* down, int down_form, void* y, void* work, int64_t tokens, int64_t top_k, int64_t experts, int64_t n,
               int64_t inner);

enum Scoring { SOFTMAX = 0, TOP_K_SOFTMAX = 1, SIGMOID = 2 };
enum GroupScore { GROUP_MAX = 0, TOP2_SUM = 1 };

// logits [T, E], bias [E] or null -> weights [T, K], ids [T, K], and the ids in the tap if there is one: so many bytes an id,
// and from one token's to the next's.
void infer_route(void* pool, int dtype, const void* logits, const float* bias, float* weights, int64_t* ids, void* tap,
                 int64_t tap_size, int64_t tap_stride, int64_t tokens, int64_t experts, int64_t top_k, int scoring,
                 int renormalize, int64_t groups, int64_t top_groups, int group_score, float scale);
// bf16 to fp32.
void infer_widen(const void* x, float* y, int64_t count);
// y = x + shared, or x + shared * sigmoid(gate) with one gate [T] per token.
void infer_add_shared(int dtype, const void* x, const void* shared, const void* gate, void* y, int64_t tokens, int64_t n);

// A sequence of the calls above that write results (not those about threads and packing), by name. Arguments are 64 bits
// each: pointers, sign-extended integers, doubles' bits. 0 if there is no such call with so many arguments.
void* infer_tape_create();
void infer_tape_destroy(void* tape);
int infer_tape_add(void* tape, const char* name, const uint64_t* slots, int64_t count);
void infer_tape_run(const void* tape);
}
