"""Every line the scenarios print, as key → (Chinese, English). The program fills the figures in."""

TITLES = [
    ("简单 GRPO 一 step", "one GRPO step"),
    ("多 step 收敛", "convergence over steps"),
    ("Rollout/Train 分离与权重版本", "rollout/train separation and weight versions"),
    ("KL 惩罚防爆", "the KL penalty holds the policy"),
    ("长尾生成与负载均衡", "long-tailed generation and load balance"),
    ("Reward Hacking 检测", "detecting reward hacking"),
    ("KV cache / PagedAttention", "KV cache / PagedAttention"),
    ("异步 Rollout", "asynchronous rollout"),
    ("Reward Model 训练", "training a reward model"),
    ("Agentic Rollout", "agentic rollout"),
]

TEXTS = {
    "task": (
        "任务:数数。prompt 是一个数字,正确的回答接着数到 9 再结束(∎):6 → 7 8 9 ∎。\n"
        "规则 reward 是走对的步数占比;策略是 bigram 模型,用精确梯度学习。时间都是虚拟时间(FakeClock)。\n",
        "The task: counting. The prompt is a digit, the right answer counts on to 9 and ends (∎): 6 → 7 8 9 ∎.\n"
        "The rule reward is the share of right steps; the policy is a bigram model that learns by its exact\n"
        "gradient. All times are virtual (FakeClock).\n",
    ),
    "title": ("场景 {number}:{title}", "Scenario {number}: {title}"),
    "passed_one": ("✅ 场景 {number} 通过", "✅ scenario {number} passed"),
    "passed_core": ("✅ 全部 6 个场景通过\n", "✅ all 6 scenarios passed\n"),
    "passed_extensions": ("✅ 全部 4 个扩展场景通过", "✅ all 4 extension scenarios passed"),
    "failed": ("  ✗ 不成立:{claim}", "  ✗ does not hold: {claim}"),
    # 1
    "1.batch": (
        "  4 个 prompt × 每组 4 个样本 = {samples} 个样本,{epochs} 个 PPO epoch",
        "  4 prompts × groups of 4 = {samples} samples, {epochs} PPO epochs",
    ),
    "1.reward": (
        "  平均 reward:更新前 {before:.3f} → 更新后 {after:.3f}(同样的 prompt,固定的评测随机种子,重新采样)",
        "  mean reward: before {before:.3f} → after {after:.3f} (same prompts, fixed evaluation seed, fresh samples)",
    ),
    "1.kl": (
        "  KL 散度 {kl:.4f},ratio 被裁剪的比例 {clip_frac:.1%}",
        "  KL divergence {kl:.4f}, ratio clipped fraction {clip_frac:.1%}",
    ),
    "1.learnt": (
        "一步之后 reward 上升,而且策略确实动了(KL > 0)",
        "one step raised the reward, and the policy did move (KL > 0)",
    ),
    "1.clipped": ("裁剪确实起了作用(比例 > 0)", "the clip did act (fraction > 0)"),
    # 2
    "2.line": (
        "  step {step:2d}:reward {reward:.3f}  kl {kl:.3f}  length {length:.1f}",
        "  step {step:2d}: reward {reward:.3f}  kl {kl:.3f}  length {length:.1f}",
    ),
    "2.example": (
        "  例:prompt 4,训练前「{before}」,训练后「{after}」",
        "  example: prompt 4, before training “{before}”, after “{after}”",
    ),
    "2.rises": (
        "reward 单调上升(第 1、5、10 步,每段至少 +{margin})",
        "reward rises monotonically over steps 1, 5 and 10, by at least {margin} each time",
    ),
    "2.kl": ("KL 低于 {bound}", "KL stays below {bound}"),
    # 3
    "3.versions": (
        "  这批 rollout 的权重版本 {rollout_version},trainer 的当前版本 {version}",
        "  weight version of these rollouts {rollout_version}, current version of the trainer {version}",
    ),
    "3.discarded": ("{stale} 个陈旧 rollout 被发现并丢弃", "{stale} stale rollouts detected and discarded"),
    "3.strict": (
        "严格模式下抛出 StaleRolloutError,什么也没有训练",
        "in strict mode StaleRolloutError is raised and nothing is trained",
    ),
    "3.fresh": (
        "用同步后的权重生成的版本 4 rollout 全部被接受",
        "rollouts generated with the pushed weights, version 4, are all accepted",
    ),
    # 4
    "4.line": (
        "  β = {beta}:reward {start:.3f} → {reward:.3f},KL {kl:.3f}",
        "  β = {beta}: reward {start:.3f} → {reward:.3f}, KL {kl:.3f}",
    ),
    "4.runaway": (
        "没有惩罚时 KL 失控:是 β = 0.1 时的 {times:.1f} 倍",
        "without the penalty KL runs away: {times:.1f} times that with β = 0.1",
    ),
    "4.cost": (
        "有惩罚时 reward 仍高于起点,代价是不如无惩罚时高",
        "with the penalty the reward still rises; the price is that it rises less",
    ),
    # 5
    "5.lengths": (
        "  {n} 个样本,{slots} 个槽位;长度 min {min},max {max},mean {mean:.1f}",
        "  {n} samples, {slots} slots; length min {min}, max {max}, mean {mean:.1f}",
    ),
    "5.times": (
        "  静态批 {static_s:.2f} s → 连续批 {continuous_s:.2f} s:耗时减少 {less_time:.0%},"
        "吞吐提升 {more_throughput:.0%}(旧耗时 ÷ 新耗时 − 1)",
        "  static {static_s:.2f} s → continuous {continuous_s:.2f} s: {less_time:.0%} less time, "
        "{more_throughput:.0%} more throughput (old time ÷ new time − 1)",
    ),
    "5.same": ("两个调度器处理的是同一批长度", "both schedulers processed the same lengths"),
    "5.faster": ("有长尾时,连续批更快", "with a long tail, continuous batching is faster"),
    # 6
    "6.hacked": (
        "  只用 RM 训练:RM 分数 {model_start:.2f} → {model:.2f},规则 reward {rule_start:.2f} → {rule:.2f};4 → {text}",
        "  trained on the RM alone: RM {model_start:.2f} → {model:.2f}, rule {rule_start:.2f} → {rule:.2f}; 4 → {text}",
    ),
    "6.mixed": (
        "  混合(α = 0.2):RM 分数 {model_start:.2f} → {model:.2f},规则 reward {rule_start:.2f} → {rule:.2f};4 → {text}",
        "  mixture (α = 0.2): RM {model_start:.2f} → {model:.2f}, rule {rule_start:.2f} → {rule:.2f}; 4 → {text}",
    ),
    "6.detected": (
        "检测到 reward hacking:RM 分数上升,规则 reward 反而下降",
        "reward hacking detected: the RM's score went up and the rule reward down",
    ),
    "6.shout": (
        "  回答「! ! !」:RM 给 {model:.2f},规则给 {rule:.0f},混合给 0.2 × {model:.2f} = {mixture:.2f}",
        "  the answer “! ! !”: RM {model:.2f}, rule {rule:.0f}, mixture 0.2 × {model:.2f} = {mixture:.2f}",
    ),
    "6.cured": (
        "用混合 reward 训练,规则 reward 上升;作弊不再划算(混合 reward:作弊 {hacker:.2f},数数 {counter:.2f})",
        "trained on the mixture the rule reward rises; hacking does not pay ({hacker:.2f} against {counter:.2f})",
    ),
    # 7
    "7.peak": (
        "  一组 {group} 个样本,prompt 10 个 token,各生成 6 个,每块 {block} 个 token;"
        "峰值块数:共享 {shared},不共享 {unshared}",
        "  {group} samples of one 10-token prompt, 6 tokens each, {block} tokens a block; "
        "peak blocks: shared {shared}, unshared {unshared}",
    ),
    "7.by_hand": (
        "与手算一致:共享 2 + {group} × 2 = {shared},不共享 {group} × 4 = {unshared};写时复制 {copies} 次",
        "as by hand: shared 2 + {group} × 2 = {shared}, unshared {group} × 4 = {unshared}; {copies} copies on write",
    ),
    "7.fragmentation": (
        "  内部碎片:分块 {paged:.0%},按最大长度连续分配 {contiguous:.0%}",
        "  internal fragmentation: blocks {paged:.0%}, contiguous allocation of the maximum length {contiguous:.0%}",
    ),
    "7.less_waste": ("分块的浪费更少", "blocks waste less"),
    "7.scarce": (
        "  同样的请求,块足够时峰值 {peak} 块;只给 {blocks} 块时,抢占 {preemptions} 次",
        "  the same requests: {peak} blocks at the peak if there are enough; given {blocks}: {preemptions} preemptions",
    ),
    "7.no_leak": (
        "被抢占过的请求最后生成完全相同的 token,而且没有泄漏一个块",
        "requests that were preempted end with the very same tokens, and no block leaks",
    ),
    # 8
    "8.sync": ("  同步:{rest}", "  synchronous: {rest}"),
    "8.async": ("  异步,有校正:{rest}", "  asynchronous, corrected: {rest}"),
    "8.uncorrected": ("  异步,无校正:{rest}", "  asynchronous, uncorrected: {rest}"),
    "8.rest": (
        "reward {start:.3f} → {reward:.3f},{steps} 步,{seconds:.2f} s,每秒 +{rate:.3f},最大陈旧度 {staleness:.0f}",
        "reward {start:.3f} → {reward:.3f}, {steps} steps, {seconds:.2f} s, +{rate:.3f}/s, staleness ≤ {staleness:.0f}",
    ),
    "8.bounded": (
        "同步时陈旧度为 0;异步时确有陈旧样本,且不超过上限 {bound}",
        "staleness is 0 when synchronous; asynchronous samples do get stale, by at most the bound of {bound}",
    ),
    "8.faster": (
        "在相同的虚拟时间里(同步还多用了一点),异步(有校正)学得更多",
        "in the same virtual time (synchronous even had a little more), asynchronous (corrected) learns more",
    ),
    "8.corrected": (
        "步数相同、用时相同,有截断重要性权重时学得更多",
        "in as many steps and as much time, truncated importance weights learn more",
    ),
    # 9
    "9.accuracy": (
        "  用 {train} 对偏好训练;在 {held_out} 对留出数据上的准确率 {before:.2f} → {accuracy:.2f}",
        "  fitted to {train} preference pairs; accuracy on {held_out} held-out pairs {before:.2f} → {accuracy:.2f}",
    ),
    "9.generalises": (
        "在没见过的偏好对上,准确率超过 {bound}",
        "on pairs it has not seen, the learnt model is right more often than {bound}",
    ),
    "9.reward": (
        "  以它为 reward 训练 {steps} 步:RM {model_start:.2f} → {model:.2f},规则 reward {rule_start:.2f} → {rule:.2f}",
        "  {steps} steps with it as the reward: RM {model_start:.2f} → {model:.2f}, rule {rule_start:.2f} → {rule:.2f}",
    ),
    "9.transfers": (
        "训练没有用到的规则 reward 也上升",
        "the rule reward, which this training never saw, rises too",
    ),
    # 10
    "10.example": (
        "  例:{question} = ?  {text}(方括号内是工具的 token)",
        "  example: {question} = ?  {text} (in brackets: tokens of the tool)",
    ),
    "10.rate": (
        "  成功率:训练前 {before:.0%} → 训练后 {after:.0%}",
        "  success rate: before training {before:.0%} → after {after:.0%}",
    ),
    "10.masked": (
        "只有模型自己的 token 计损失:任意改动 {tool_tokens} 个工具 token 的 logprob,损失与梯度分毫不变",
        "only the model's own tokens carry loss: whatever the log-probability of the {tool_tokens} tool tokens, "
        "loss and gradient are the same",
    ),
    "10.learnt": ("学会使用工具之后,成功率上升", "having learnt to use the tool, it succeeds more often"),
}
