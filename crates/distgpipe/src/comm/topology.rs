//! The members of a run: the workers of the plan, once per replica, and the links between them.

use distgpipe_core::schedule::Plan;
use distgpipe_core::WorkerId;

/// Room for messages in flight that are not in the plan: commands, reports, state tensors.
const SLACK: usize = 16;

/// The members of a run. With `W` workers in the plan and `R` replicas there are `R × W` of them: member `r × W + w` has the
/// role of the plan's worker `w` for replica `r`'s part of each batch. The members of one role form a ring, in which they
/// all-reduce their gradients. With one replica, the members are the plan's workers.
#[derive(Clone, Debug)]
pub struct Topology {
    plan: Plan,
    replicas: usize,
}

impl Topology {
    /// `replicas` copies of a plan's workers; 0 counts as 1.
    pub fn new(plan: Plan, replicas: usize) -> Self {
        Topology { plan, replicas: replicas.max(1) }
    }

    /// The training plan that each replica runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The number of replicas.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// The number of members, over all replicas.
    pub fn size(&self) -> usize {
        self.replicas * self.roles()
    }

    /// All members, replica by replica.
    pub fn members(&self) -> impl Iterator<Item = WorkerId> + use<> {
        (0..self.size()).map(WorkerId::new)
    }

    /// The member that has a role in a replica.
    pub fn member(&self, replica: usize, role: WorkerId) -> WorkerId {
        WorkerId::new(replica * self.roles() + role.index())
    }

    /// The replica that a member belongs to.
    pub fn replica_of(&self, member: WorkerId) -> usize {
        member.index() / self.roles()
    }

    /// The worker of the plan whose role a member has.
    pub fn role_of(&self, member: WorkerId) -> WorkerId {
        WorkerId::new(member.index() % self.roles())
    }

    /// A member's name: the plan's name of its role, followed by `/` and the replica if there are several.
    pub fn name(&self, member: WorkerId) -> String {
        self.plan.placement().member_name(self.role_of(member), self.replica_of(member), self.replicas)
    }

    /// The member that this one sends gradients to in the ring.
    pub fn next(&self, member: WorkerId) -> WorkerId {
        self.member((self.replica_of(member) + 1) % self.replicas, self.role_of(member))
    }

    /// The member that this one receives gradients from in the ring.
    pub fn previous(&self, member: WorkerId) -> WorkerId {
        self.member((self.replica_of(member) + self.replicas - 1) % self.replicas, self.role_of(member))
    }

    /// Whether two members exchange messages, so that a link is needed between them.
    pub fn linked(&self, a: WorkerId, b: WorkerId) -> bool {
        a != b && (self.planned(a, b) + self.planned(b, a) > 0 || self.next(a) == b || self.next(b) == a)
    }

    /// The roles of two members if they belong to the same replica.
    pub fn roles_within(&self, a: WorkerId, b: WorkerId) -> Option<(WorkerId, WorkerId)> {
        (self.replica_of(a) == self.replica_of(b)).then(|| (self.role_of(a), self.role_of(b)))
    }

    /// The number of messages that a step may have waiting in a member's mailbox.
    pub fn mailbox_capacity(&self, member: WorkerId) -> usize {
        self.plan.receives(self.role_of(member)) + 2 * self.plan.micro_batches() + self.waiting_segments() + SLACK
    }

    /// The number of messages that a step may have waiting to be sent from one member's process to another's.
    pub fn queue_capacity(&self, from: WorkerId, to: WorkerId) -> usize {
        self.planned(from, to) + 3 * self.plan.micro_batches() + self.waiting_segments() + SLACK
    }

    /// The number of gradient segments that may wait for a member that is still computing. A member sends one segment for
    /// each that it has received, so each member behind this one in the ring is at most one segment ahead of the next.
    fn waiting_segments(&self) -> usize {
        self.replicas - 1
    }

    /// The number of messages of the plan from one member to another in a step.
    fn planned(&self, from: WorkerId, to: WorkerId) -> usize {
        self.roles_within(from, to).map_or(0, |(from, to)| self.plan.messages(from, to))
    }

    fn roles(&self) -> usize {
        self.plan.placement().workers()
    }
}
