"""What users do with tensors of which this rank has a part: right, or refused.

refuse_pickle.py       files, and whole tensors that are loaded
dtensor_operations.py  operations and writes that torch refuses or loses
dtensor_reads.py       numbers in a DTensor, and copies into one
linear_loss.py         the loss of a head, in chunks, without all logits at once
part_gradients.py      gradients between a backward pass and a step
cut_gradient.py        those of cut layers, beside those of whole ones
assigned_data.py       `parameter.data = ...`
left_gathered.py       writes to what is gathered for backward

Tested by: tests/training/test_common_lines.py, tests/training/test_linear_cross_entropy.py,
tests/training/test_given_parameters.py
"""
