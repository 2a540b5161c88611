"""The paper's studies of the discovery system: arms, paired seeds, tables."""
