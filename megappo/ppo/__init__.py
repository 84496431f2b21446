"""Pure maths of PPO: tensors and numbers in, tensors out; imports torch and itself only.

`masking` sums over trained tokens, `kl` measures the distance to a reference, `rewards` puts
scores and KL on tokens, `advantages` turns rewards into advantages, `losses` turns advantages
into what is minimised. Nothing here communicates: functions return sums and counts, and whoever
holds the process groups reduces and divides once.
"""
