"""FA4's kernel for Blackwell in time, without the hardware: modelled, never measured.

`trace` runs the kernel in the emulator and notes what each role does, in its order. `counts` asks
the compiler how many instructions a block costs the softmax. `rates` has the published rates of a
B200's units, with their sources. `model` replays the trace with these rates.
"""
