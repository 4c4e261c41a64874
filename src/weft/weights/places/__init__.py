"""Where the parts of a module lie: arithmetic on names and bytes, without a device.

module_sizes.py    `module_sizes`; sizes such as "5GB"
place_units.py     which parts lie in one place, and which may be streamed
choose_places.py   which unit goes where, and the room that streaming takes
plan_placement.py  `plan_placement`, and the plan as a value
placed_tensors.py  the tensors of a module on their way there, and back

Tested by: tests/weights/places, tests/transforms/test_place.py
"""
