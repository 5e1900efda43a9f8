//! Who takes part in a run: the workers of the plan, once for each replica.

use distgpipe_core::schedule::Plan;
use distgpipe_core::WorkerId;

/// How many messages beside those of the plan may be under way: commands, reports, state tensors.
const SLACK: usize = 16;

/// The members of a run. With `W` workers in the plan and `R` replicas there are `R × W` of them: member `r × W + w` does
/// what the plan has worker `w` do, with replica `r`'s part of each batch. Members of the same role stand in a ring, round
/// which they add up their gradients. Without replicas, members are the plan's workers.
#[derive(Clone, Debug)]
pub struct Roster {
    plan: Plan,
    replicas: usize,
}

impl Roster {
    /// So many replicas of a plan's workers; at least one.
    pub fn new(plan: Plan, replicas: usize) -> Self {
        Roster { plan, replicas: replicas.max(1) }
    }

    /// What each replica runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// How many replicas there are.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// How many members there are.
    pub fn size(&self) -> usize {
        self.replicas * self.roles()
    }

    /// The members' numbers.
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

    /// The worker of the plan that a member is.
    pub fn role_of(&self, member: WorkerId) -> WorkerId {
        WorkerId::new(member.index() % self.roles())
    }

    /// A member's name: the plan's, with the replica behind it if there are several.
    pub fn name(&self, member: WorkerId) -> String {
        let name = self.plan.placement().name(self.role_of(member));
        match self.replicas {
            1 => name.to_owned(),
            _ => format!("{name}/{}", self.replica_of(member)),
        }
    }

    /// Whom a member hands gradients to.
    pub fn next(&self, member: WorkerId) -> WorkerId {
        self.member((self.replica_of(member) + 1) % self.replicas, self.role_of(member))
    }

    /// From whom a member gets gradients.
    pub fn previous(&self, member: WorkerId) -> WorkerId {
        self.member((self.replica_of(member) + self.replicas - 1) % self.replicas, self.role_of(member))
    }

    /// Whether two members exchange anything.
    pub fn linked(&self, a: WorkerId, b: WorkerId) -> bool {
        a != b && (self.planned(a, b) + self.planned(b, a) > 0 || self.next(a) == b || self.next(b) == a)
    }

    /// The roles of two members of the same replica.
    pub fn roles_within(&self, a: WorkerId, b: WorkerId) -> Option<(WorkerId, WorkerId)> {
        (self.replica_of(a) == self.replica_of(b)).then(|| (self.role_of(a), self.role_of(b)))
    }

    /// Room for everything a step may send to a member.
    pub fn mailbox_capacity(&self, member: WorkerId) -> usize {
        self.plan.receives(self.role_of(member)) + 2 * self.plan.micro_batches() + self.shares() + SLACK
    }

    /// Room for everything a step may send from one member's process to another's.
    pub fn queue_capacity(&self, from: WorkerId, to: WorkerId) -> usize {
        self.planned(from, to) + 3 * self.plan.micro_batches() + self.shares() + SLACK
    }

    /// How many shares of gradients may wait for a member that still computes. One is sent for each that came, so those
    /// behind him in the ring are at most one ahead of each other.
    fn shares(&self) -> usize {
        self.replicas - 1
    }

    /// How many messages the plan has one member send another in a step.
    fn planned(&self, from: WorkerId, to: WorkerId) -> usize {
        self.roles_within(from, to).map_or(0, |(from, to)| self.plan.messages(from, to))
    }

    fn roles(&self) -> usize {
        self.plan.placement().workers()
    }
}
