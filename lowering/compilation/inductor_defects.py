"""Have inductor compile, and compile right, what it gets wrong.

In: a block in which inductor compiles. Within it, inductor runs the pass of `input_copies`, and the functions of
`ports/replacements/inductor_patches.py` stand before inductor's own, each where inductor has the defect.

Note [Transposed sums into memory]
Where inductor's C++ vectorises in two dimensions and adds to memory atomically (`index_add`, the backward of an
embedding), it adds the offset within the tile to the place once for the tile and once more for the vector, and so
writes past the end of the memory: silently wrong, or a crash later (pytorch/pytorch#191837). `_store_once` leaves the
first one out. PyTorch 2.14 does so itself.

Note [Reads before writes]
Inductor gets functional graphs, in which a result never shares memory with an operand, and makes some results in place
of an operand that nobody needs afterwards. Whether somebody needs it is asked of later operators only, and not of this
one: for `x.index_add_(0, i, x.clone())` inductor drops the clone, and the loop that adds to `x` reads from `x`, too.
Three parts put this right, each where it is known exactly what reads what, so that other graphs copy nothing more:

  the graph                `input_copies` copies what is read after its memory has got its last value
  the lowering             an operand whose loop would read the memory that the operator writes is computed before
                           (`_lowering_that_reads_first`)
  the fusion of loops      inductor joins a loop that writes `x` with an earlier one that reads `x` only where both
                           are at the same place of `x`, but looks only for reads of `x` as it was at the start, not
                           after an earlier write; `_reads_where_it_writes` looks for all of them

Note [Code that does not compile]
Two parts of inductor's C++ for the CPU raise, or give code that no C++ compiler takes, for graphs that are common in
optimizers and in transforms of functions:

  local memory             loops over the same rows are joined, and what one of them makes for another is kept in memory
                           of one row. Inductor asks each later loop where it reads such a buffer, also those that write
                           into a part of it and read nothing: `KeyError: 'buf1'` (pytorch/pytorch#196570)
  sums along columns       a sum in float16 or bfloat16 is cast into a variable of its name before it is stored. A sum
                           that is stored twice declares the variable twice (pytorch/pytorch#194706)

Note [What trials do not replace]
A plan with a fault is refused, and repaired (Note [A refused plan is repaired]). Each part here is for what that does
not give:

  reads before writes      whether these defects show depends on values: not if places are in order, where buffers are
                           zero, or where tensors that are swapped are equal, as they are in first steps. The trial
                           agrees, and later steps are wrong. Where it refuses the plan, the repaired one takes 1.1 to
                           1.7 times as long for the operators concerned
  transposed sums          a write past the end of memory is no result that could be compared
  code that does not       a compile that fails is repaired, too, after several that fail as well, and stretches of the
    compile                graph are left to kernels
  checks before writes     the values of the trial are not refused

The same is true of writes that are declined (Note [Writes that compilers get wrong]). Tests say which versions of
PyTorch have mended each: `MENDED_IN` in `tests/cpu/test_inductor_defects.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from lazy_backend.lowering.checks.refusals import is_check
from lazy_backend.lowering.compilation import input_copies
from lazy_backend.lowering.ir.graph import TensorMeta, intern_meta
from lazy_backend.lowering.ir.overlap import overlap
from lazy_backend.ports.replacements.inductor_patches import Window, defects_mended


def without_defects() -> AbstractContextManager[None]:
    """A block without the defects that the notes of this module name, in which what checks values comes before what
    writes inputs (Note [Values are checked before writes]).
    """
    copy, files = input_copies.copy_what_outlives_its_memory, (input_copies.__file__,)
    return defects_mended(copy, files, _may_overlap, is_check)


def _may_overlap(one: Window, other: Window) -> bool:
    return overlap(_meta_of(one), _meta_of(other))


def _meta_of(window: Window) -> TensorMeta:
    size, stride, offset, dtype = window
    return intern_meta(size, stride, offset, dtype, conj=False, neg=False)
