"""The lab's verbs: what the entry points `thinwire.verbs` name. Nothing is loaded before one runs."""

from thinwire.app.cli.verbs import Verb

simulate = Verb("simulate runs on given links and machines, without training", "thinwire.lab.cli.simulate")
branch = Verb("train an expert for a domain from a run's model, into an ensemble", "thinwire.lab.cli.branch")
plan_fit = Verb("a ladder of your own runs -> exponents, joint laws, training density", "thinwire.lab.cli.plan.fit")
plan_pack = Verb("sequences of mixed lengths -> balanced micro-steps", "thinwire.lab.cli.plan.pack")
plan_tp = Verb(
    "a model -> how the ranks of a site would split it, with the rule of each parameter", "thinwire.lab.cli.plan.tp"
)
plan_topology = Verb("graphs for gossip -> neighbours, spectrum, bytes on a link", "thinwire.lab.cli.plan.topology")
