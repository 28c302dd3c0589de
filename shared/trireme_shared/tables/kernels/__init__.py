"""The loops over ids and rows of a table, compiled by numba; they run without the interpreter's lock.

Memory is handed over as addresses (uint64), since numba cannot grow arrays of arrays:

    cells[slot]   -> an open-addressing hash table of `capacities[slot]` cells of two words: the id, and
                     stamp (28 bits) | log2 of the frequency (5) | row + 1 (31); 0: the cell is empty
    chunks[k]     -> rows k * 2**shift and following, each of `width` float32: values, then the optimizer's
                  state

A row's stamp is the number of the step that changed it last, modulo 2**28; its age at version v is v minus
that step. A row is expired at version v if its age is above `ttl` (ttl < 0: never): it reads as if it was not
there. Sums and products are rounded one by one, except
where torch uses one fused operation (`fma`).
"""
