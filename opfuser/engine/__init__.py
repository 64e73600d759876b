"""Plans: made from a call's facts, laid out as schedules, executed in both passes."""
