// The C interface of tiled attention: C99 and C++, without any other header of the library.
//
//   strobe_attention_args args;
//   strobe_attention_args_init(&args, sizeof args);
//   ...                                                    // dtype, sizes, operands, softmax_scale, options
//   strobe_attention_forward_workspace(&args, &args.workspace_bytes);
//   args.workspace = aligned_alloc(64, args.workspace_bytes);  // C11's, or any memory aligned to 64 bytes
//   if (strobe_attention_forward(&args) != STROBE_OK) puts(strobe_last_error());
//
// No function throws, ends the process or prints. A call that succeeds allocates nothing but, the first time, the
// threads of the OpenMP runtime. Calls from several threads are independent as long as the memory they write is.
#ifndef STROBE_KERNELS_ATTENTION_C_H
#define STROBE_KERNELS_ATTENTION_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// What became of a call. Unless it is STROBE_OK, strobe_last_error() says why; the first three refusals come before any
// operand is read or written.
typedef enum strobe_status {
  STROBE_OK = 0,
  STROBE_INVALID_ARGUMENT = 1,     // a field that is wrong on any device
  STROBE_UNSUPPORTED = 2,          // a case that the device, the kernel or this build cannot compute
  STROBE_WORKSPACE_TOO_SMALL = 3,  // workspace_bytes is below what the workspace function says
  STROBE_CUDA_ERROR = 4,           // the device failed
  STROBE_INTERNAL_ERROR = 5        // a defect of the library, or no memory for an error message
} strobe_status;

// Values of strobe_attention_args.dtype.
enum { STROBE_DTYPE_F32 = 0, STROBE_DTYPE_F64 = 1, STROBE_DTYPE_BF16 = 2, STROBE_DTYPE_F16 = 3 };

// Values of strobe_attention_args.device_type.
enum { STROBE_DEVICE_CPU = 0, STROBE_DEVICE_CUDA = 1 };

// Values of strobe_attention_args.kernel.
enum {
  STROBE_ATTENTION_AUTO = 0,      // the fastest that accepts the case
  STROBE_ATTENTION_PORTABLE = 1,  // the only one on the CPU
  STROBE_ATTENTION_MMA = 2,       // tensor cores, from sm_80 on
  STROBE_ATTENTION_HOPPER = 3     // tensor cores of sm_90a
};

// An operand of shape (batch, seq_len, num_heads, head_dim), packed (total, num_heads, head_dim). Strides are in
// elements, may be negative, for inputs also 0, and are not read along an axis of length 1; elements of a head lie next
// to each other. Memory of `dtype` on the device, aligned to an element; null only where there is no element.
typedef struct strobe_attention_tensor {
  void* data;            // element (0, 0, 0, 0); inputs are not written
  int64_t batch_stride;  // not read for packed operands
  int64_t seq_stride;
  int64_t head_stride;
} strobe_attention_tensor;

// One call, forward or backward. Fill it with strobe_attention_args_init, then set the required fields and the options.
//
// out = softmax(scores) value with scores = softcap(softmax_scale * query key^T) + ALiBi bias, -inf where masked;
// lse = natural log of the sum of exp of the scores. Query head h reads kv head h / (num_heads / num_kv_heads). With
// d = seq_len_k - seq_len_q, masks are aligned at the bottom right: query i stands at key i + d. A query that sees no
// key gets out 0 and lse -inf; what a query does not see never influences it. Any length may be 0.
//
// Packed sequences (cu_seqlens_q and cu_seqlens_k given): sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 of
// operands without a batch axis. Rows behind the last sequence are padding: never read, out and gradients 0, lse -inf.
//
// What is written (out and lse forward; dquery, dkey and dvalue backward; the workspace) must not overlap itself, each
// other or what is read. Operands may interleave, as the thirds of a (batch, seq_len, 3, num_heads, head_dim) tensor
// do.
typedef struct strobe_attention_args {
  size_t struct_size;    // sizeof(strobe_attention_args): says which version's fields the struct has
  int32_t dtype;         // required: STROBE_DTYPE_*, of every operand but lse and dlse
  int32_t device_type;   // STROBE_DEVICE_*, where all memory of this call is; default: the CPU
  int32_t device_index;  // which GPU; 0 for the CPU
  int32_t kernel;        // STROBE_ATTENTION_*; default: automatic
  void* stream;          // cudaStream_t the work is queued on; not read for the CPU, whose calls return when done

  int64_t batch;         // required: sequences, at least 0
  int64_t seq_len_q;     // required: length of a query sequence, at least 0; packed: at least the longest one
  int64_t seq_len_k;     // required: length of a key sequence, at least 0; packed: at least the longest one
  int64_t num_heads;     // required: heads of query and out, a multiple of num_kv_heads
  int64_t num_kv_heads;  // required: heads of key and value, at least 1
  int64_t head_dim;      // required: 1 to 256

  strobe_attention_tensor query;  // required: (batch, seq_len_q, num_heads, head_dim)
  strobe_attention_tensor key;    // required: (batch, seq_len_k, num_kv_heads, head_dim)
  strobe_attention_tensor value;  // required: as key
  strobe_attention_tensor out;    // required: as query; written forward, read backward
  void* lse;  // required: (batch, num_heads, seq_len_q), packed (num_heads, total_q), contiguous; f64 for f64, else
              // f32; written forward, read backward

  double softmax_scale;   // required (usually 1 / sqrt(head_dim)): of magnitude at most 1e30, may be 0 or negative
  int32_t causal;         // 1: query i sees key j when j <= i + d; 0: it need not be; default 0
  int32_t deterministic;  // 1: the same inputs give the same bits (the CPU always does so); 0: any order; default 1
  int64_t window_left;    // query i sees key j when j >= i + d - window_left; -1: unlimited; default -1
  int64_t window_right;   // query i sees key j when j <= i + d + window_right; -1: unlimited; default -1
  double softcap;         // scaled scores s become softcap * tanh(s / softcap); 0: off, else 1e-30 to 1e30; default 0
  const float* alibi_slopes;    // (num_heads), adds -slope * abs(i + d - j); null: none; default null
  double dropout_p;             // elements of P are dropped with this rate, in steps of 1 / 256, below 1; default 0
  uint64_t dropout_seed;        // the mask is a pure function of seed, offset, batch index, head and positions
  uint64_t dropout_offset;      // forward and backward take the same seed and offset
  const int32_t* cu_seqlens_q;  // (batch + 1): from 0, not decreasing, at most total_q; null: not packed; default null
  const int32_t* cu_seqlens_k;  // the same for keys and total_k; both or neither
  int64_t total_q;              // packed: rows of query, out, dout and dquery
  int64_t total_k;              // packed: rows of key, value, dkey and dvalue

  void* workspace;         // scratch memory aligned to 64 bytes; null where 0 bytes are needed
  size_t workspace_bytes;  // at least what the workspace function of the pass says

  // The rest is read by the backward pass alone.
  strobe_attention_tensor dout;    // required: gradient of out, as out
  int64_t dout_dim_stride;         // stride of dout's head_dim, may be 0 or negative; default 1
  const void* dlse;                // gradient of lse, as lse; null: none; default null
  strobe_attention_tensor dquery;  // required, written: as query
  strobe_attention_tensor dkey;    // required, written: as key, summed over the query heads of a group
  strobe_attention_tensor dvalue;  // required, written: as value, summed over the query heads of a group
} strobe_attention_args;

// Fills args with the defaults. Required fields become 0, null or, for softmax_scale, NaN, so that a forgotten one is
// refused. struct_size: sizeof *args as the caller compiled it.
//
// Later versions only append fields. They accept the sizes of earlier ones, a missing field then having its default; a
// size that the library does not know, such as that of a newer header, is STROBE_INVALID_ARGUMENT and nothing is
// filled.
strobe_status strobe_attention_args_init(strobe_attention_args* args, size_t struct_size);

// Bytes of scratch memory a call needs with the number of threads that OpenMP uses now, a multiple of 64. Looks at
// sizes and options; operands, lse and workspace may still be null. On the CPU the cu_seqlens are read. *bytes becomes
// 0 when the call is refused.
strobe_status strobe_attention_forward_workspace(const strobe_attention_args* args, size_t* bytes);
strobe_status strobe_attention_backward_workspace(const strobe_attention_args* args, size_t* bytes);

// Writes every element of out and lse.
strobe_status strobe_attention_forward(const strobe_attention_args* args);

// Writes every element of dquery, dkey and dvalue from out and lse as the forward pass wrote them; P is recomputed.
strobe_status strobe_attention_backward(const strobe_attention_args* args);

// Why this thread's last call of a function above was refused: the function, the field, what was given and what was
// expected. Empty after a success; valid until this thread's next call. Never null.
const char* strobe_last_error(void);

// The version of the library: 10000 * major + 100 * minor + patch, and the same as text, "0.1.0".
int32_t strobe_version_number(void);
const char* strobe_version_string(void);

#ifdef __cplusplus
}
#endif

#endif
