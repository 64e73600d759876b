"""Plans: made from a call's facts, written as programs, executed in both passes."""
