"""`kvferry doctor`: whether one machine, or two, can hand KV over; or which workers of a fleet fit."""
