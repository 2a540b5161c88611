"""Where candidates run: the jail, its workers, and the gate for what they return."""
